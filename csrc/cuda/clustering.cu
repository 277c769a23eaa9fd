// The clustering operators on CUDA: checks, workspace, launches, registration.
#include "clustering.cuh"

#include "arguments.h"

namespace clusterkv {
namespace {

// A problem together with the tensors that it points into.
template <class T>
struct Clustering {
  ClusteringProblem<T> p{};
  Tensor initial, valid, labels, parts, bias, counts, starts, order, changed;

  Clustering(const Tensor& keys, const Tensor& centroids) {
    check_shape(keys, "keys", {-1, -1, -1, -1});
    check_shape(centroids, "centroids", {keys.size(0), keys.size(1), -1, keys.size(3)});
    check_type(centroids, "centroids", ScalarType::Float);
    check_head_dim(keys.size(3));
    check_fits_int(keys.size(2), "keys");
    STD_TORCH_CHECK(centroids.size(2) > 0, "centroids: expected at least one cluster, got 0");
    STD_TORCH_CHECK(keys.size(0) * keys.size(1) <= 65535,
                    "keys: expected at most 65535 rows times heads, got ", shape_of(keys));
    p.keys = rows_of<const T>(keys, "keys");
    p.centroids = rows_of<float>(centroids, "centroids");
    p.batch = int(keys.size(0));
    p.heads = int(keys.size(1));
    p.kv_len = int(keys.size(2));
    p.num_clusters = int(centroids.size(2));
    p.head_dim = int(keys.size(3));
    p.is_aligned = p.head_dim % Chunk<T>::kSize == 0 && is_aligned(p.keys);
  }

  void set_valid(const std::optional<Tensor>& given) {
    if (!given) return;
    valid = int_tensor(*given, "valid", {p.batch, 2});
    p.valid = int_data(valid);
  }

  void set_initial(const Tensor& given) {
    initial = int_tensor(given, "initial", {p.batch, p.num_clusters});
    p.initial = int_data(initial);
  }

  void allocate_for_assignment(const Tensor& keys) {
    using E = typename Factors<T>::Element;
    labels = new_ints(keys, {p.batch, p.heads, p.kv_len});
    const int64_t clusters = int64_t(p.lists()) * p.num_clusters;
    parts = new_bytes(keys, Factors<T>::kCentroidParts * clusters * p.padded_dim() * sizeof(E));
    bias = new_floats(keys, {clusters});
    p.labels = data_of<int>(labels);
    p.parts = data_of<E>(parts);
    p.bias = data_of<float>(bias);
  }

  void allocate_for_sort(const Tensor& keys) {
    counts = new_ints(keys, {p.lists(), p.sort_tiles(), p.num_clusters});
    starts = new_ints(keys, {p.lists(), p.num_clusters + 1});
    order = new_ints(keys, {p.lists(), p.kv_len});
    p.counts = data_of<int>(counts);
    p.starts = data_of<int>(starts);
    p.order = data_of<int>(order);
  }

  void allocate_for_loop(const Tensor& keys, int64_t max_iter) {
    STD_TORCH_CHECK(max_iter >= 0 && max_iter <= 10000, "max_iter: expected 0 to 10000, got ",
                    max_iter);
    changed = new_zeros(keys, {max_iter + 1, p.lists()});
    p.changed = data_of<int>(changed);
  }
};

Tensor assign_clusters(const Tensor& keys, const Tensor& centroids, std::optional<Tensor> valid) {
  return dispatch_floating(keys, "keys", [&](auto* type) {
    Clustering<std::remove_pointer_t<decltype(type)>> call(keys, centroids);
    call.set_valid(valid);
    call.allocate_for_assignment(keys);
    const Device device(keys);
    if (call.labels.numel() > 0) launch_assign(call.p, 0, device.stream);
    device.check_launch();
    return call.labels;
  });
}

Tensor update_centroids(const Tensor& keys, const Tensor& labels, const Tensor& centroids) {
  return dispatch_floating(keys, "keys", [&](auto* type) {
    Tensor updated = new_floats(
        centroids, {centroids.size(0), centroids.size(1), centroids.size(2), centroids.size(3)});
    torch::stable::copy_(updated, centroids);
    Clustering<std::remove_pointer_t<decltype(type)>> call(keys, updated);
    call.labels = int_tensor(labels, "labels", {call.p.batch, call.p.heads, call.p.kv_len});
    call.p.labels = data_of<int>(call.labels);
    call.allocate_for_sort(keys);
    const Device device(keys);
    if (call.labels.numel() > 0) {
      launch_sort(call.p, 0, device.stream);
      launch_update(call.p, 0, device.stream);
    }
    device.check_launch();
    return updated;
  });
}

// k-means of `keys` into `centroids`, and the index to `target`.
template <class T>
void cluster_into(const Tensor& keys, const Tensor& centroids, const Tensor& initial,
                  const std::optional<Tensor>& valid, int64_t max_iter, const IndexTarget& target) {
  Clustering<T> call(keys, centroids);
  call.set_initial(initial);
  call.set_valid(valid);
  call.allocate_for_assignment(keys);
  call.allocate_for_sort(keys);
  call.allocate_for_loop(keys, max_iter);
  const Device device(keys);
  launch_cluster_keys(call.p, target, int(max_iter), device.stream);
  device.check_launch();
}

std::tuple<Tensor, Tensor, Tensor> cluster_keys(const Tensor& keys, const Tensor& initial,
                                                std::optional<Tensor> valid, int64_t max_iter) {
  check_shape(keys, "keys", {-1, -1, -1, -1});
  check_shape(initial, "initial", {keys.size(0), -1});
  STD_TORCH_CHECK(keys.size(2) > 0, "keys: expected at least one token, got 0");
  const int64_t batch = keys.size(0), heads = keys.size(1), num_clusters = initial.size(1);
  const Tensor centroids = new_floats(keys, {batch, heads, num_clusters, keys.size(3)});
  const Tensor indptr = new_ints(keys, {batch, heads, num_clusters + 1});
  const Tensor indices = new_ints(keys, {batch, heads, keys.size(2)});
  const IndexTarget target{rows_of<int>(indptr, "indptr"),
                           rows_of<int>(indices, "indices"),
                           int(num_clusters),
                           int(keys.size(2)),
                           0,
                           true};
  dispatch_floating(keys, "keys", [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    cluster_into<T>(keys, centroids, initial, valid, max_iter, target);
  });
  return {centroids, indptr, indices};
}

void extend_index_(Tensor centroids, Tensor indptr, Tensor indices, const Tensor& keys,
                   const Tensor& initial, std::optional<Tensor> valid, int64_t first_cluster,
                   int64_t first_token, int64_t max_iter) {
  check_shape(keys, "keys", {-1, -1, -1, -1});
  check_shape(initial, "initial", {keys.size(0), -1});
  const int64_t batch = keys.size(0), heads = keys.size(1), added = initial.size(1);
  check_shape(centroids, "centroids", {batch, heads, -1, keys.size(3)});
  const int64_t places = centroids.size(2);
  check_shape(indptr, "indptr", {batch, heads, places + 1});
  check_shape(indices, "indices", {batch, heads, -1});
  check_type(indptr, "indptr", ScalarType::Int);
  check_type(indices, "indices", ScalarType::Int);
  STD_TORCH_CHECK(first_cluster >= 0 && added <= places - first_cluster,
                  "first_cluster: expected room for ", added, " clusters among ", places, ", got ",
                  first_cluster);
  check_fits_int(indices.size(2), "indices");
  check_fits_int(first_token + keys.size(2), "first_token");
  STD_TORCH_CHECK(first_token >= 0, "first_token: expected at least 0, got ", first_token);
  IndexTarget target{rows_of<int>(indptr, "indptr"),
                     rows_of<int>(indices, "indices"),
                     int(places - first_cluster),
                     int(indices.size(2)),
                     int(first_token),
                     false};
  target.indptr.data += first_cluster;
  const Tensor own = torch::stable::narrow(centroids, 2, first_cluster, added);
  dispatch_floating(keys, "keys", [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    cluster_into<T>(keys, own, initial, valid, max_iter, target);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(CLUSTERKV_LIBRARY, CLUSTERKV_DISPATCH_KEY, m) {
  m.impl("assign_clusters", TORCH_BOX(&assign_clusters));
  m.impl("update_centroids", TORCH_BOX(&update_centroids));
  m.impl("cluster_keys", TORCH_BOX(&cluster_keys));
  m.impl("extend_index_", TORCH_BOX(&extend_index_));
}

}  // namespace clusterkv
