// select_clusters on CUDA: checks, workspace, launches, registration.
#include "selection.cuh"

#include "arguments.h"

namespace clusterkv {
namespace {

template <class T>
void set_sizes(SelectionProblem<T>& p, const Tensor& query, const Tensor& centroids,
               const Tensor& indptr, const Tensor& indices) {
  check_shape(query, "query", {-1, -1, 1, -1});
  check_shape(centroids, "centroids", {query.size(0), -1, -1, query.size(3)});
  const int64_t num_clusters = centroids.size(2);
  check_shape(indptr, "indptr", {query.size(0), centroids.size(1), num_clusters + 1});
  check_shape(indices, "indices", {query.size(0), centroids.size(1), -1});
  check_type(centroids, "centroids", ScalarType::Float);
  check_type(indptr, "indptr", ScalarType::Int);
  check_type(indices, "indices", ScalarType::Int);
  check_head_dim(query.size(3));
  check_fits_int(indices.size(2), "indices");
  STD_TORCH_CHECK(num_clusters < kMaxClusters, "centroids: expected fewer than ", kMaxClusters,
                  " clusters, got ", num_clusters);
  STD_TORCH_CHECK(centroids.size(1) > 0 && query.size(1) % centroids.size(1) == 0,
                  "query: expected a multiple of ", centroids.size(1), " heads, got ",
                  query.size(1));
  p.index.centroids = rows_of<const float>(centroids, "centroids");
  p.index.indptr = rows_of<const int>(indptr, "indptr");
  p.index.indices = rows_of<const int>(indices, "indices");
  p.index.num_clusters = int(num_clusters);
  p.index.kv_len = int(indices.size(2));
  p.batch = int(query.size(0));
  p.num_qo_heads = int(query.size(1));
  p.num_kv_heads = int(centroids.size(1));
  p.head_dim = int(query.size(3));
}

template <class T>
std::tuple<Tensor, Tensor> select(const Tensor& query, const Tensor& centroids,
                                  const Tensor& indptr, const Tensor& indices, int64_t budget,
                                  bool is_per_query_head, double scale) {
  SelectionProblem<T> p{};
  set_sizes(p, query, centroids, indptr, indices);
  p.query = rows_of<const T>(query, "query");
  p.budget = int(budget);
  p.scale = float(scale);
  p.is_per_query_head = is_per_query_head;
  const int64_t select_heads = is_per_query_head ? p.num_qo_heads : p.num_kv_heads;
  const Tensor out = new_ints(query, {p.batch, select_heads, budget});
  const Tensor num_selected = new_ints(query, {p.batch, select_heads});
  const Tensor scores = new_floats(query, {p.batch, p.num_qo_heads, p.index.num_clusters});
  const int64_t bytes =
      selection_workspace_bytes(p.index.num_clusters, p.budget, p.batch * select_heads);
  const Tensor workspace = new_bytes(query, bytes);
  p.scores = data_of<float>(scores);
  p.workspace = bytes > 0 ? data_of<unsigned char>(workspace) : nullptr;
  p.indices = data_of<int>(out);
  p.num_selected = data_of<int>(num_selected);
  const Device device(query);
  launch_select_clusters(p, device.stream);
  device.check_launch();
  return {out, num_selected};
}

std::tuple<Tensor, Tensor> select_clusters(const Tensor& query, const Tensor& centroids,
                                           const Tensor& indptr, const Tensor& indices,
                                           int64_t budget, std::string head_rule, double scale) {
  check_fits_int(budget, "budget");
  STD_TORCH_CHECK(budget >= 0, "budget: expected at least 0, got ", budget);
  const bool is_per_query_head = head_rule == "query_head";
  STD_TORCH_CHECK(is_per_query_head || head_rule == "kv_head",
                  "head_rule: expected query_head or kv_head, got ", head_rule);
  return dispatch_floating(query, "query", [&](auto* type) {
    return select<std::remove_pointer_t<decltype(type)>>(query, centroids, indptr, indices, budget,
                                                         is_per_query_head, scale);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(CLUSTERKV_LIBRARY, CLUSTERKV_DISPATCH_KEY, m) {
  m.impl("select_clusters", TORCH_BOX(&select_clusters));
}

}  // namespace clusterkv
