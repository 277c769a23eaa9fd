// assign_clusters, update_centroids, cluster_keys and extend_index_ on the CPU.
//
// Each (row, KV head) is a k-means of its own. Heads are taken in waves that fit in scratch memory;
// within a wave every step (widen, assign, add) is cut into items of (head, block of tokens) or
// (head, block of channels), and a head that has converged leaves the wave. Every sum is added in
// the order of the tokens by one thread, so threads change nothing.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <memory>
#include <optional>

#include "assignment.h"
#include "checks.h"
#include "cluster_sums.h"
#include "clustering_kernels.h"
#include "parallel.h"

#define CLUSTERKV_KERNEL_TEXT "clustering_kernel.h"
#include "per_isa.h"

namespace clusterkv {
namespace {

constexpr int64_t kChannels = 16;  // channels of an item of the update: one cache line of a key
constexpr int64_t kWaveBytes = int64_t{64} << 20;  // scratch memory for widened keys

const ClusteringKernels& kernels() {
  static const ClusteringKernels table = CLUSTERKV_PICK(clustering_kernels)();
  return table;
}

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// The clustered tokens of each row; all of them without `valid`.
std::vector<Range> ranges_of(const std::optional<Tensor>& valid, int64_t batch, int64_t kv_len) {
  std::vector<Range> ranges(batch, Range{0, kv_len});
  if (!valid.has_value()) return ranges;
  check_shape(*valid, "valid", {batch, 2});
  check_type(*valid, "valid", ScalarType::Int, "int32");
  const int32_t* data = valid->const_data_ptr<int32_t>();
  for (int64_t row = 0; row < batch; ++row) {
    const int32_t* ends = data + row * valid->stride(0);
    const int64_t begin = std::clamp<int64_t>(ends[0], 0, kv_len);
    ranges[row] = {begin, std::clamp<int64_t>(ends[valid->stride(1)], begin, kv_len)};
  }
  return ranges;
}

int64_t pieces(int64_t total, int64_t size) { return (total + size - 1) / size; }

struct Shape {
  int64_t batch, heads, kv_len, head_dim;
};

Shape shape_of_keys(const Tensor& keys) {
  check_shape(keys, "keys", {-1, -1, -1, -1});
  const Shape shape{keys.size(0), keys.size(1), keys.size(2), keys.size(3)};
  check_head_dim(shape.head_dim);
  check_kv_len(shape.kv_len);
  return shape;
}

// One head on its way through k-means. Pointers into the result, which is the index itself.
struct Head {
  int64_t row, head;
  Range range;
  float* centroids;
  int64_t stride;
  std::unique_ptr<float[]> keys;    // [range.size(), D]
  std::vector<float> norms;         // [range.size()]
  std::vector<float> bounds;        // [panels, range.size()], see Note [Skipping panels]
  std::vector<int32_t> labels;      // [range.size()]
  std::vector<uint8_t> is_changed;  // of each block
  Panels panels;
  ClusterSums sums;

  int64_t blocks() const { return pieces(range.size(), kBlock); }
  int tokens_of(int64_t block) const {
    return static_cast<int>(std::min<int64_t>(kBlock, range.size() - block * kBlock));
  }
};

// Calls f(head, piece) for every piece of every head.
template <class F>
void for_each_piece(const std::vector<Head*>& wave, int64_t (*count_of)(const Head&), int64_t work,
                    const F& f) {
  std::vector<std::pair<Head*, int64_t>> items;
  for (Head* head : wave)
    for (int64_t i = 0; i < count_of(*head); ++i) items.emplace_back(head, i);
  for_each_item(items.size(), work, [&](int64_t i) { f(*items[i].first, items[i].second); });
}

int64_t blocks_of(const Head& head) { return head.blocks(); }
int64_t one(const Head&) { return 1; }

class KMeans {
 public:
  KMeans(int64_t num_clusters, int64_t head_dim)
      : num_clusters_(num_clusters), head_dim_(head_dim) {}

  template <class T>
  void run(std::vector<Head*> wave, const Rows<T>& keys, int64_t max_iter) const {
    for_each_piece(wave, blocks_of, work_of(wave), [&](Head& head, int64_t block) {
      const int64_t first = block * kBlock, count = head.tokens_of(block);
      float* to = head.keys.get() + first * head_dim_;
      kernels().widen(keys.at(head.row, head.head, head.range.begin + first), keys.stride_i, to,
                      head_dim_, count, static_cast<int>(head_dim_));
      for (int64_t t = 0; t < count; ++t) head.norms[first + t] = norm_of(to + t * head_dim_);
    });
    for (int64_t iteration = 0; !wave.empty(); ++iteration) {
      assign(wave, iteration > 0);
      const auto is_done = [&](Head* head) {
        const auto& changed = head->is_changed;
        return iteration == max_iter ||
               std::find(changed.begin(), changed.end(), 1) == changed.end();
      };
      wave.erase(std::remove_if(wave.begin(), wave.end(), is_done), wave.end());
      update(wave);
    }
  }

 private:
  int64_t work_of(const std::vector<Head*>& wave) const {
    int64_t tokens = 0;
    for (const Head* head : wave) tokens += head->range.size();
    return tokens * head_dim_;
  }

  float norm_of(const float* key) const {
    float square = 0.f;
    for (int64_t d = 0; d < head_dim_; ++d) square += key[d] * key[d];
    return std::sqrt(square);
  }

  void assign(const std::vector<Head*>& wave, bool has_bounds) const {
    for_each_piece(wave, one, num_clusters_ * head_dim_ * wave.size(),
                   [](Head& head, int64_t) { head.panels.point(head.centroids, head.stride); });
    for_each_piece(wave, blocks_of, work_of(wave) * num_clusters_, [&](Head& head, int64_t block) {
      const int64_t first = block * kBlock;
      const Block tokens{head.keys.get() + first * head_dim_, head.norms.data() + first,
                         head.bounds.data() + first,          head.range.size(),
                         head.labels.data() + first,          head.tokens_of(block)};
      head.is_changed[block] = BlockAssignment(kernels(), head.panels, tokens).run(has_bounds);
    });
  }

  void update(const std::vector<Head*>& wave) const {
    const int64_t parts = pieces(head_dim_, kChannels);
    for_each_item(wave.size() * parts, work_of(wave), [&](int64_t i) {
      Head& head = *wave[i / parts];
      const int64_t channel = i % parts * kChannels;
      kernels().move_keys(head.keys.get() + channel, head_dim_, head.range.size(),
                          head.labels.data(), head.sums.summed.data(),
                          static_cast<int>(num_clusters_),
                          static_cast<int>(std::min(kChannels, head_dim_ - channel)), head_dim_,
                          head.sums.sums.data() + channel);
    });
    for_each_piece(wave, one, work_of(wave), [&](Head& head, int64_t) {
      head.sums.follow(head.labels.data());
      head.sums.write_means(head.centroids, head.stride, head_dim_);
    });
  }

  int64_t num_clusters_, head_dim_;
};

// Where clusters go: a new index (first_cluster = first_token = 0) or places of an existing one.
struct Destination {
  Rows<float> centroids;
  Rows<int32_t> indptr, indices;
  int64_t num_places, capacity, first_cluster, first_token;
  bool is_new;
};

// Writes a head's labels as compressed sparse rows. False where `indices` has no room.
bool write_index(const Head& head, int64_t num_clusters, const Destination& to) {
  int32_t* indptr = to.indptr.at(head.row, head.head);
  int32_t* indices = to.indices.at(head.row, head.head);
  if (to.is_new) indptr[0] = 0;
  int32_t end = indptr[to.first_cluster];
  std::vector<int32_t> next(num_clusters, 0);
  int64_t total = 0;
  for (int32_t label : head.labels)
    if (label >= 0) ++next[label], ++total;
  if (end < 0 || end + total > to.capacity) return false;
  for (int64_t c = 0; c < num_clusters; ++c) {
    const int32_t size = next[c];
    next[c] = end;
    indptr[to.first_cluster + c + 1] = end += size;
  }
  for (int64_t place = to.first_cluster + num_clusters + 1; place <= to.num_places; ++place)
    indptr[place] = end;
  const int64_t offset = to.first_token + head.range.begin;
  for (size_t t = 0; t < head.labels.size(); ++t)
    if (head.labels[t] >= 0) indices[next[head.labels[t]]++] = static_cast<int32_t>(offset + t);
  if (to.is_new) std::fill(indices + end, indices + to.capacity, -1);
  return true;
}

// The given tokens' keys as first centroids; clusters without a token take no part. Panels group
// clusters that start near each other.
template <class T>
void start(Head& head, const Rows<T>& keys, const Tensor& initial, int64_t head_dim) {
  const int64_t num_clusters = initial.size(1);
  const int32_t* tokens = initial.const_data_ptr<int32_t>() + head.row * initial.stride(0);
  const auto token_of = [&](int64_t c) { return tokens[c * initial.stride(1)]; };
  std::vector<int32_t> members;
  for (int64_t c = 0; c < num_clusters; ++c) {
    float* centroid = head.centroids + c * head.stride;
    std::fill_n(centroid, head_dim, 0.f);
    if (token_of(c) < 0) continue;
    members.push_back(static_cast<int32_t>(c));
    kernels().widen(keys.at(head.row, head.head, token_of(c)), head_dim, centroid, head_dim, 1,
                    static_cast<int>(head_dim));
  }
  std::sort(members.begin(), members.end(), [&](int32_t a, int32_t b) {
    return token_of(a) != token_of(b) ? token_of(a) < token_of(b) : a < b;
  });
  head.panels.arrange(members, num_clusters, kernels().panel_width, static_cast<int>(head_dim));
  head.keys.reset(new float[head.range.size() * head_dim]);
  head.sums.start(num_clusters, head_dim, head.range.size());
  head.norms.resize(head.range.size());
  head.bounds.resize(head.range.size() * head.panels.count);
  head.labels.assign(head.range.size(), -2);
  head.is_changed.assign(head.blocks(), 0);
}

void check_initial(const Tensor& initial, int64_t batch, int64_t kv_len) {
  check_shape(initial, "initial", {batch, -1});
  check_type(initial, "initial", ScalarType::Int, "int32");
  const int32_t* data = initial.const_data_ptr<int32_t>();
  for (int64_t row = 0; row < batch; ++row)
    for (int64_t c = 0; c < initial.size(1); ++c) {
      const int32_t token = data[row * initial.stride(0) + c * initial.stride(1)];
      STD_TORCH_CHECK(token >= -1 && token < kv_len, "initial: expected tokens in [-1, ", kv_len,
                      "), got ", token);
    }
}

void run_all(const Tensor& keys, const Tensor& initial, const std::optional<Tensor>& valid,
             int64_t max_iter, const Destination& to) {
  const Shape shape = shape_of_keys(keys);
  check_initial(initial, shape.batch, shape.kv_len);
  STD_TORCH_CHECK(max_iter >= 0, "max_iter: expected at least 0, got ", max_iter);
  const std::vector<Range> ranges = ranges_of(valid, shape.batch, shape.kv_len);
  const int64_t num_clusters = initial.size(1), all = shape.batch * shape.heads;
  const int64_t head_bytes = shape.kv_len * shape.head_dim * int64_t{sizeof(float)} + 1;
  const int64_t in_wave =
      std::clamp<int64_t>(kWaveBytes / head_bytes, 1, std::max<int64_t>(all, 1));
  bool has_room = true;
  dispatch_floating(keys, "keys", [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const Rows<T> rows = rows_of<T>(keys, "keys");
    for (int64_t first = 0; first < all; first += in_wave) {
      std::vector<Head> heads(std::min(in_wave, all - first));
      std::vector<Head*> wave;
      for (Head& head : heads) {
        const int64_t i = first + static_cast<int64_t>(wave.size());
        head.row = i / shape.heads, head.head = i % shape.heads;
        head.range = ranges[head.row];
        head.centroids = to.centroids.at(head.row, head.head, to.first_cluster);
        head.stride = to.centroids.stride_i;
        start(head, rows, initial, shape.head_dim);
        wave.push_back(&head);
      }
      KMeans(num_clusters, shape.head_dim).run(wave, rows, max_iter);
      for (const Head& head : heads) has_room &= write_index(head, num_clusters, to);
    }
  });
  STD_TORCH_CHECK(has_room, "indices: expected room for the new tokens, got capacity ",
                  to.capacity);
}

Tensor assign_clusters(const Tensor& keys, const Tensor& centroids,
                       const std::optional<Tensor>& valid) {
  const Shape shape = shape_of_keys(keys);
  const Rows<float> rows =
      float_rows(centroids, "centroids", {shape.batch, shape.heads, -1, shape.head_dim});
  const std::vector<Range> ranges = ranges_of(valid, shape.batch, shape.kv_len);
  const int64_t num_clusters = centroids.size(2), blocks = pieces(shape.kv_len, kBlock);
  Tensor labels =
      torch::stable::new_empty(keys, {shape.batch, shape.heads, shape.kv_len}, ScalarType::Int);
  int32_t* out = labels.mutable_data_ptr<int32_t>();
  const int head_dim = static_cast<int>(shape.head_dim);
  std::vector<int32_t> members(num_clusters);
  for (int64_t c = 0; c < num_clusters; ++c) members[c] = static_cast<int32_t>(c);
  std::vector<Panels> panels(shape.batch * shape.heads);
  for (size_t i = 0; i < panels.size(); ++i) {
    panels[i].arrange(members, num_clusters, kernels().panel_width, head_dim);
    panels[i].point(rows.at(i / shape.heads, i % shape.heads), rows.stride_i);
  }
  dispatch_floating(keys, "keys", [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const Rows<T> key_rows = rows_of<T>(keys, "keys");
    const int64_t items = static_cast<int64_t>(panels.size()) * blocks;
    for_each_item(items, items * kBlock * num_clusters * head_dim, [&](int64_t item) {
      static thread_local std::vector<float> widened;
      const int64_t i = item / blocks, row = i / shape.heads, head = i % shape.heads;
      const int64_t begin = item % blocks * kBlock;
      const int64_t end = std::min(begin + kBlock, shape.kv_len);
      int32_t* to = out + i * shape.kv_len;
      std::fill(to + begin, to + end, -1);
      const int64_t from = std::max(begin, ranges[row].begin);
      const int64_t count = std::min(end, ranges[row].end) - from;
      if (count <= 0) return;
      widened.resize(count * head_dim);
      kernels().widen(key_rows.at(row, head, from), key_rows.stride_i, widened.data(), head_dim,
                      count, head_dim);
      const Block tokens{widened.data(), nullptr, nullptr, 0, to + from, static_cast<int>(count)};
      BlockAssignment(kernels(), panels[i], tokens).run(false);
    });
  });
  return labels;
}

Tensor update_centroids(const Tensor& keys, const Tensor& labels, const Tensor& centroids) {
  const Shape shape = shape_of_keys(keys);
  const Rows<int32_t> label_rows =
      index_rows(labels, "labels", {shape.batch, shape.heads, shape.kv_len});
  const Rows<float> from =
      float_rows(centroids, "centroids", {shape.batch, shape.heads, -1, shape.head_dim});
  const int64_t num_clusters = centroids.size(2), head_dim = shape.head_dim;
  Tensor updated = torch::stable::new_empty(
      centroids, {shape.batch, shape.heads, num_clusters, head_dim}, ScalarType::Float);
  float* out = updated.mutable_data_ptr<float>();
  dispatch_floating(keys, "keys", [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const Rows<T> rows = rows_of<T>(keys, "keys");
    const int64_t heads = shape.batch * shape.heads;
    for_each_item(heads, heads * shape.kv_len * head_dim, [&](int64_t i) {
      const int64_t row = i / shape.heads, head = i % shape.heads;
      ClusterSums sums;
      sums.start(num_clusters, head_dim, shape.kv_len);
      const int32_t* of_token = label_rows.at(row, head);
      float widened[kMaxHeadDim];
      for (int64_t t = 0; t < shape.kv_len; ++t) {
        kernels().widen(rows.at(row, head, t), head_dim, widened, head_dim, 1,
                        static_cast<int>(head_dim));
        kernels().move_keys(widened, head_dim, 1, of_token + t, sums.summed.data() + t,
                            static_cast<int>(num_clusters), static_cast<int>(head_dim), head_dim,
                            sums.sums.data());
      }
      sums.follow(of_token);
      float* means = out + i * num_clusters * head_dim;
      for (int64_t c = 0; c < num_clusters; ++c)
        std::copy_n(from.at(row, head, c), head_dim, means + c * head_dim);
      sums.write_means(means, head_dim, head_dim);
    });
  });
  return updated;
}

std::tuple<Tensor, Tensor, Tensor> cluster_keys(const Tensor& keys, const Tensor& initial,
                                                const std::optional<Tensor>& valid,
                                                int64_t max_iter) {
  const Shape shape = shape_of_keys(keys);
  check_shape(initial, "initial", {shape.batch, -1});
  const int64_t batch = shape.batch, heads = shape.heads, num_clusters = initial.size(1);
  Tensor centroids = torch::stable::new_empty(keys, {batch, heads, num_clusters, shape.head_dim},
                                              ScalarType::Float);
  Tensor indptr = torch::stable::new_empty(keys, {batch, heads, num_clusters + 1}, ScalarType::Int);
  Tensor indices = torch::stable::new_empty(keys, {batch, heads, shape.kv_len}, ScalarType::Int);
  run_all(keys, initial, valid, max_iter,
          {rows_of<float>(centroids, "centroids"), rows_of<int32_t>(indptr, "indptr"),
           rows_of<int32_t>(indices, "indices"), num_clusters, shape.kv_len, 0, 0, true});
  return {centroids, indptr, indices};
}

void extend_index_(const Tensor& centroids, const Tensor& indptr, const Tensor& indices,
                   const Tensor& keys, const Tensor& initial, const std::optional<Tensor>& valid,
                   int64_t first_cluster, int64_t first_token, int64_t max_iter) {
  const Shape shape = shape_of_keys(keys);
  check_shape(initial, "initial", {shape.batch, -1});
  const Rows<float> centroid_rows =
      float_rows(centroids, "centroids", {shape.batch, shape.heads, -1, shape.head_dim});
  const int64_t num_places = centroids.size(2);
  const Rows<int32_t> indptr_rows =
      index_rows(indptr, "indptr", {shape.batch, shape.heads, num_places + 1});
  const Rows<int32_t> index_list = index_rows(indices, "indices", {shape.batch, shape.heads, -1});
  STD_TORCH_CHECK(first_cluster >= 0 && first_cluster + initial.size(1) <= num_places,
                  "centroids: expected room for clusters ", first_cluster, " to ",
                  first_cluster + initial.size(1), ", got ", num_places, " places");
  STD_TORCH_CHECK(first_token >= 0, "first_token: expected at least 0, got ", first_token);
  check_kv_len(first_token + shape.kv_len);
  run_all(keys, initial, valid, max_iter,
          {centroid_rows, indptr_rows, index_list, num_places, indices.size(2), first_cluster,
           first_token, false});
}

}  // namespace
}  // namespace clusterkv

STABLE_TORCH_LIBRARY_IMPL(clusterkv, CPU, m) {
  m.impl("assign_clusters", TORCH_BOX(&clusterkv::assign_clusters));
  m.impl("update_centroids", TORCH_BOX(&clusterkv::update_centroids));
  m.impl("cluster_keys", TORCH_BOX(&clusterkv::cluster_keys));
  m.impl("extend_index_", TORCH_BOX(&clusterkv::extend_index_));
}
