// select_clusters on the CPU.
//
// Per selecting head: scores of all clusters, a heap of the non-empty ones, and the best are popped
// until the budget is full: O(C + k log C) for k chosen of C clusters, where a sort is O(C log C).

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <string>
#include <vector>

#include "checks.h"
#include "parallel.h"

namespace clusterkv {

struct SelectionKernels {
  void (*score_clusters)(const float* centroids, int64_t stride, int64_t num_clusters,
                         const float* queries, int heads, int head_dim, float* scores,
                         int64_t scores_stride);
  void (*add_softmax)(float* scores, const float* log_sizes, int64_t padded, float scale,
                      float* mass);
};

}  // namespace clusterkv

#define CLUSTERKV_KERNEL_TEXT "selection_kernel.h"
#include "per_isa.h"

namespace clusterkv {
namespace {

const SelectionKernels& kernels() {
  static const SelectionKernels table = CLUSTERKV_PICK(selection_kernels)();
  return table;
}

struct Ranked {
  float score;
  int32_t cluster;
};

// Order of a heap whose top is the best score, and of equal ones the lower cluster.
bool is_worse(const Ranked& a, const Ranked& b) {
  return a.score == b.score ? a.cluster > b.cluster : a.score < b.score;
}

struct Scratch {
  std::vector<float> queries, scores, log_sizes, mass;
  std::vector<Ranked> heap;
};

struct Selection {
  Rows<float> centroids;
  Rows<int32_t> indptr, indices;
  int64_t num_kv_heads, num_clusters, capacity, head_dim, budget;
  int32_t* selected;      // [B, Hs, budget]
  int32_t* num_selected;  // [B, Hs]
};

int64_t padded(int64_t num_clusters) { return (num_clusters + 15) / 16 * 16; }

// Fills one row of the result. `ranks` [C]. False where the index leads out of `indices`.
bool take_best(const Selection& s, int64_t row, int64_t head, const float* ranks, int64_t list,
               std::vector<Ranked>& heap) {
  const int32_t* indptr = s.indptr.at(row, head);
  const int32_t* indices = s.indices.at(row, head);
  int32_t* out = s.selected + list * s.budget;
  heap.clear();
  for (int64_t c = 0; c < s.num_clusters; ++c)
    if (indptr[c + 1] > indptr[c])  // what is not a number ranks last
      heap.push_back({ranks[c] == ranks[c] ? ranks[c] : -INFINITY, static_cast<int32_t>(c)});
  std::make_heap(heap.begin(), heap.end(), is_worse);
  int64_t count = 0;
  while (count < s.budget && !heap.empty()) {
    const int32_t cluster = heap.front().cluster;
    std::pop_heap(heap.begin(), heap.end(), is_worse);
    heap.pop_back();
    const int64_t begin = indptr[cluster], end = indptr[cluster + 1];
    if (begin < 0 || end > s.capacity) return false;
    const int64_t taken = std::min(end - begin, s.budget - count);
    std::copy_n(indices + begin, taken, out + count);
    count += taken;
  }
  std::fill(out + count, out + s.budget, -1);
  s.num_selected[list] = static_cast<int32_t>(count);
  return true;
}

// Turns the scores of a group into one rank: the attention that a token of each cluster would get
// from all query heads if it had its centroid's key.
void rank_for_group(const Selection& s, const int32_t* indptr, int64_t group_size, float scale,
                    Scratch& scratch) {
  const int64_t places = padded(s.num_clusters);
  scratch.log_sizes.assign(places, -INFINITY);
  scratch.mass.assign(places, 0.f);
  for (int64_t c = 0; c < s.num_clusters; ++c) {
    const int32_t size = indptr[c + 1] - indptr[c];
    if (size > 0) scratch.log_sizes[c] = std::log(static_cast<float>(size));
  }
  for (int64_t g = 0; g < group_size; ++g)
    kernels().add_softmax(scratch.scores.data() + g * places, scratch.log_sizes.data(), places,
                          scale, scratch.mass.data());
  for (int64_t c = 0; c < s.num_clusters; ++c)
    scratch.mass[c] /= static_cast<float>(std::max(indptr[c + 1] - indptr[c], 1));
}

std::tuple<Tensor, Tensor> select_clusters(const Tensor& query, const Tensor& centroids,
                                           const Tensor& indptr, const Tensor& indices,
                                           int64_t budget, const std::string& head_rule,
                                           double scale) {
  check_shape(query, "query", {-1, -1, 1, -1});
  const int64_t batch = query.size(0), num_qo_heads = query.size(1), head_dim = query.size(3);
  check_head_dim(head_dim);
  Selection s;
  s.centroids = float_rows(centroids, "centroids", {batch, -1, -1, head_dim});
  s.num_kv_heads = centroids.size(1), s.num_clusters = centroids.size(2);
  s.indptr = index_rows(indptr, "indptr", {batch, s.num_kv_heads, s.num_clusters + 1});
  s.indices = index_rows(indices, "indices", {batch, s.num_kv_heads, -1});
  s.capacity = indices.size(2), s.head_dim = head_dim, s.budget = budget;
  STD_TORCH_CHECK(s.num_kv_heads > 0 && num_qo_heads % s.num_kv_heads == 0,
                  "query: expected a multiple of ", s.num_kv_heads, " heads, got ", num_qo_heads);
  STD_TORCH_CHECK(budget >= 0, "budget: expected at least 0, got ", budget);
  const bool is_shared = head_rule == "kv_head";
  STD_TORCH_CHECK(is_shared || head_rule == "query_head",
                  "head_rule: expected query_head or kv_head, got ", head_rule);
  const int64_t group_size = num_qo_heads / s.num_kv_heads, places = padded(s.num_clusters);
  const int64_t lists = is_shared ? s.num_kv_heads : num_qo_heads;
  Tensor selected = torch::stable::new_empty(indices, {batch, lists, budget}, ScalarType::Int);
  Tensor num_selected = torch::stable::new_empty(indices, {batch, lists}, ScalarType::Int);
  s.selected = selected.mutable_data_ptr<int32_t>();
  s.num_selected = num_selected.mutable_data_ptr<int32_t>();
  std::atomic<bool> is_sound{true};
  dispatch_floating(query, "query", [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const Rows<T> queries = rows_of<T>(query, "query");
    const int64_t heads = batch * s.num_kv_heads;
    const int64_t work = heads * group_size * s.num_clusters * (head_dim + 64);
    for_each_item(heads, work, [&](int64_t i) {
      static thread_local Scratch scratch;
      const int64_t row = i / s.num_kv_heads, head = i % s.num_kv_heads;
      scratch.queries.resize(group_size * head_dim);
      scratch.scores.resize(group_size * places);
      for (int64_t g = 0; g < group_size; ++g)
        for (int64_t d = 0; d < head_dim; ++d)
          scratch.queries[g * head_dim + d] = to_float(queries.at(row, head * group_size + g)[d]);
      kernels().score_clusters(s.centroids.at(row, head), s.centroids.stride_i, s.num_clusters,
                               scratch.queries.data(), static_cast<int>(group_size),
                               static_cast<int>(head_dim), scratch.scores.data(), places);
      bool fits = true;
      if (is_shared) {
        for (int64_t g = 0; g < group_size; ++g)
          std::fill(scratch.scores.begin() + g * places + s.num_clusters,
                    scratch.scores.begin() + (g + 1) * places, 0.f);
        rank_for_group(s, s.indptr.at(row, head), group_size, static_cast<float>(scale), scratch);
        fits = take_best(s, row, head, scratch.mass.data(), i, scratch.heap);
      } else {
        for (int64_t g = 0; g < group_size; ++g)
          fits &= take_best(s, row, head, scratch.scores.data() + g * places, i * group_size + g,
                            scratch.heap);
      }
      if (!fits) is_sound = false;
    });
  });
  STD_TORCH_CHECK(is_sound, "indptr: expected entries in [0, ", s.capacity, "], got another");
  return {selected, num_selected};
}

}  // namespace
}  // namespace clusterkv

STABLE_TORCH_LIBRARY_IMPL(clusterkv, CPU, m) {
  m.impl("select_clusters", TORCH_BOX(&clusterkv::select_clusters));
}
