// Every kernel once or twice on small inputs, for the sanitizers. Results are checked elsewhere;
// here each buffer is a heap block of exactly the right size, and rows have odd strides.
#include <cstdio>
#include <limits>
#include <memory>
#include <stdexcept>
#include <vector>

#include "attention.cuh"
#include "clustering.cuh"
#include "recall.cuh"
#include "selection.cuh"

namespace clusterkv {
namespace {

// Numbers between -1 and 1, the same in every run.
template <class T>
std::vector<T> numbers(size_t count) {
  static unsigned state = 1;
  std::vector<T> result(count);
  for (T& x : result) {
    state = state * 1664525u + 1013904223u;
    x = from_float<T>(float(int(state >> 8) % 2001 - 1000) / 1000.f);
  }
  return result;
}

struct Sizes {
  int batch, heads, group, kv_len, head_dim;
};

// K and V of a token side by side, tokens outermost.
template <class T>
struct Store {
  std::vector<T> buffer;
  Rows<const T> keys, values;

  explicit Store(const Sizes& s)
      : buffer(numbers<T>(size_t(s.kv_len) * s.batch * s.heads * 2 * s.head_dim)) {
    const int64_t row = 2 * s.head_dim, token = int64_t(s.batch) * s.heads * row;
    keys = {buffer.data(), s.heads * row, row, token};
    values = {buffer.data() + s.head_dim, s.heads * row, row, token};
  }
};

template <class T, int kLanes, int kHeads>
void attention_case(const Sizes& s, int selected, bool is_shared, MaskKind kind) {
  const Store<T> store(s);
  const int heads = s.heads * s.group, select_heads = is_shared ? s.heads : heads;
  std::vector<T> query = numbers<T>(size_t(s.batch) * heads * s.head_dim), out(query.size());
  std::vector<int> indices(size_t(s.batch) * select_heads * selected);
  for (size_t i = 0; i < indices.size(); ++i) indices[i] = int(i * 7 % (s.kv_len + 3)) - 2;
  std::vector<int> spans;
  for (int row = 0; row < s.batch; ++row) {
    spans.insert(spans.end(), {0, 4, s.kv_len / 2, s.kv_len + row});
  }
  std::vector<unsigned char> mask(size_t(s.batch) * s.kv_len * 4, 1);
  AttentionProblem<T> p{};
  p.query = {query.data(), int64_t(heads) * s.head_dim, s.head_dim, s.head_dim};
  p.keys = store.keys;
  p.values = store.values;
  p.indices = indices.data();
  p.spans = spans.data();
  p.mask = {mask.data(), s.kv_len, 0, 1, kind};
  p.batch = s.batch;
  p.num_qo_heads = heads;
  p.num_kv_heads = s.heads;
  p.num_select_heads = select_heads;
  p.kv_len = s.kv_len;
  p.num_selected = selected;
  p.head_dim = s.head_dim;
  p.splits = attention_splits(p.kv_len, selected);
  p.scale = 0.1f;
  p.is_aligned = s.head_dim % Chunk<T>::kSize == 0;
  std::vector<float> lse(size_t(s.batch) * heads), part_lse(lse.size() * p.splits);
  std::vector<float> part_out(part_lse.size() * s.head_dim);
  p.out = out.data();
  p.lse = lse.data();
  p.partial_out = part_out.data();
  p.partial_lse = part_lse.data();
  launch_attention_split<T, kLanes, 1, kHeads>(p, is_shared ? s.group : 1, nullptr);
  launch_attention_merge(p, nullptr);
  std::vector<T> merged(out.size());
  std::vector<float> merged_lse(lse.size());
  launch_merge_states(out.data(), lse.data(), out.data(), lse.data(), merged.data(),
                      merged_lse.data(), int64_t(lse.size()), s.head_dim, nullptr);
}

// Rows that each hold as many tokens as their index, as labels i % C would sort them.
struct Index {
  std::vector<float> centroids;
  std::vector<int> indptr, indices;
  IndexView view;

  Index(const Sizes& s, int clusters) {
    centroids = numbers<float>(size_t(s.batch) * s.heads * clusters * s.head_dim);
    for (int list = 0; list < s.batch * s.heads; ++list) {
      for (int c = 0; c <= clusters; ++c) indptr.push_back(c * (s.kv_len / clusters));
      for (int i = 0; i < s.kv_len; ++i) indices.push_back(i);
    }
    const int64_t row = int64_t(clusters) * s.head_dim;
    view.centroids = {centroids.data(), s.heads * row, row, s.head_dim};
    view.indptr = {indptr.data(), int64_t(s.heads) * (clusters + 1), clusters + 1, 0};
    view.indices = {indices.data(), int64_t(s.heads) * s.kv_len, s.kv_len, 0};
    view.num_clusters = clusters;
    view.kv_len = s.kv_len;
  }
};

template <class T>
void selection_case(const Sizes& s, int clusters, int budget, bool is_per_query_head,
                    bool has_workspace) {
  const Index index(s, clusters);
  const int heads = s.heads * s.group, select_heads = is_per_query_head ? heads : s.heads;
  const std::vector<T> query = numbers<T>(size_t(s.batch) * heads * s.head_dim);
  std::vector<float> scores(size_t(s.batch) * heads * clusters);
  std::vector<int> out(size_t(s.batch) * select_heads * budget), counts(s.batch * select_heads);
  const int64_t bytes = round_up(int64_t(Ranking::bytes_of(clusters, budget)), 16);
  std::vector<unsigned char> workspace(size_t(bytes) * counts.size());
  SelectionProblem<T> p{};
  p.query = {query.data(), int64_t(heads) * s.head_dim, s.head_dim, s.head_dim};
  p.index = index.view;
  p.scores = scores.data();
  p.workspace = has_workspace ? workspace.data() : nullptr;
  p.indices = out.data();
  p.num_selected = counts.data();
  p.batch = s.batch;
  p.num_qo_heads = heads;
  p.num_kv_heads = s.heads;
  p.head_dim = s.head_dim;
  p.budget = budget;
  p.scale = 0.1f;
  p.is_per_query_head = is_per_query_head;
  launch_select_clusters(p, nullptr);
}

template <class T>
void clustering_case(const Sizes& s, int clusters, int max_iter) {
  const Store<T> store(s);
  const size_t lists = size_t(s.batch) * s.heads;
  ClusteringProblem<T> p{};
  p.batch = s.batch;
  p.heads = s.heads;
  p.kv_len = s.kv_len;
  p.num_clusters = clusters;
  p.head_dim = s.head_dim;
  p.is_aligned = s.head_dim % Chunk<T>::kSize == 0;
  std::vector<float> centroids(lists * clusters * s.head_dim), bias(lists * clusters);
  std::vector<int> initial, valid, labels(lists * s.kv_len), order(labels.size());
  for (int row = 0; row < s.batch; ++row) {
    valid.insert(valid.end(), {row, s.kv_len - row});
    for (int c = 0; c < clusters; ++c) initial.push_back(c == 0 && row > 0 ? -1 : c + row);
  }
  // In 16-byte units, as an allocator of device memory aligns.
  using Unit = Chunk<typename ClusteringProblem<T>::Element>;
  std::vector<Unit> parts(Factors<T>::kCentroidParts * lists * clusters * p.padded_dim() /
                          Unit::kSize);
  std::vector<int> counts(lists * p.sort_tiles() * clusters), starts(lists * (clusters + 1));
  std::vector<int> changed((max_iter + 1) * lists), indptr(lists * (clusters + 1)), indices(order);
  const int64_t row = int64_t(clusters) * s.head_dim;
  p.keys = store.keys;
  p.centroids = {centroids.data(), s.heads * row, row, s.head_dim};
  p.initial = initial.data();
  p.valid = valid.data();
  p.labels = labels.data();
  p.parts = parts[0].values;
  p.bias = bias.data();
  p.counts = counts.data();
  p.starts = starts.data();
  p.order = order.data();
  p.changed = changed.data();
  const Rows<int> of_indptr{indptr.data(), int64_t(s.heads) * (clusters + 1), clusters + 1, 0};
  const Rows<int> of_indices{indices.data(), int64_t(s.heads) * s.kv_len, s.kv_len, 0};
  const IndexTarget target{of_indptr, of_indices, clusters, s.kv_len, 0, true};
  launch_cluster_keys(p, target, max_iter, nullptr);
}

template <class T>
void recall_case(const Sizes& s, int selected, int num_slots, bool has_workspace) {
  const Store<T> store(s);
  const int lists = s.batch * s.heads, wanted = s.group * selected;
  std::vector<T> rows(size_t(lists) * num_slots * s.head_dim), value_rows(rows.size());
  std::vector<int> indices(size_t(lists) * wanted), held(size_t(lists) * num_slots, -1);
  std::vector<int> ages(held.size()), slots(indices.size()), hits(lists), misses(lists);
  std::vector<int> free_slots(held.size());
  std::vector<Fetch> fetches(indices.size());
  RecallProblem p{};
  p.table_size = int(table_size_for(wanted));
  std::vector<TokenEntry> table(size_t(lists) * p.table_size);
  p.indices = indices.data();
  p.slot_indices = held.data();
  p.slot_ages = ages.data();
  p.slots = slots.data();
  p.hits = hits.data();
  p.misses = misses.data();
  p.table = has_workspace ? table.data() : nullptr;
  p.fetches = fetches.data();
  p.free_slots = free_slots.data();
  p.lists = lists;
  p.wanted = wanted;
  p.num_slots = num_slots;
  p.kv_len = s.kv_len;
  p.recall_steps = 1;
  const int64_t row = int64_t(num_slots) * s.head_dim;
  FetchProblem<T> fetch{store.keys,
                        store.values,
                        {rows.data(), s.heads * row, row, s.head_dim},
                        {value_rows.data(), s.heads * row, row, s.head_dim},
                        fetches.data(),
                        misses.data(),
                        s.heads,
                        wanted,
                        s.head_dim,
                        s.head_dim % Chunk<T>::kSize == 0};
  for (int step = 0; step < 3; ++step) {
    for (size_t i = 0; i < indices.size(); ++i) {
      indices[i] = int((i * 5 + step * 9) % (s.kv_len + 2)) - 1;
    }
    launch_recall(p, fetch, nullptr);
  }
}

void run() {
  attention_case<__nv_bfloat16, 8, 4>({2, 2, 3, 150, 64}, 40, true, MaskKind::kBool);
  attention_case<float, 16, 1>({1, 1, 2, 70, 33}, 20, false, MaskKind::kNone);
  attention_case<__half, 16, 4>({1, 1, 8, 90, 128}, 0, true, MaskKind::kNone);
  selection_case<__nv_bfloat16>({2, 1, 3, 120, 64}, 30, 40, true, false);
  selection_case<float>({1, 2, 2, 90, 33}, 15, 20, false, true);
  clustering_case<__nv_bfloat16>({2, 1, 1, 150, 64}, 9, 2);
  clustering_case<float>({1, 1, 1, 70, 33}, 35, 1);
  recall_case<__nv_bfloat16>({2, 1, 3, 90, 64}, 20, 90, false);
  recall_case<float>({1, 1, 1, 50, 33}, 30, 45, true);
}

}  // namespace
}  // namespace clusterkv

int main() {
  try {
    clusterkv::run();
  } catch (const std::exception& error) {
    std::puts(error.what());
    return 3;
  }
  std::puts("all kernels ran");
}
