// Spherical k-means of the keys of each (batch, head), and the index that it leaves.
//
//   initial centroids -> [ assign -> sort -> update ] x max_iter -> assign -> sort into the index
//
// Every launch is issued; a (batch, head) that has converged skips the rest of its own
// (clustering_problem.cuh). Nothing waits for the device.
#pragma once

#include "assign.cuh"
#include "sort_labels.cuh"
#include "update.cuh"

namespace clusterkv {

// The keys of the initial tokens; zeros for a cluster that the row doesn't have.
template <class T>
__global__ void __launch_bounds__(128)
    clusterkv_initial_centroids(const __grid_constant__ ClusteringProblem<T> p) {
  const int cluster = blockIdx.x, batch = blockIdx.y / p.heads, head = blockIdx.y % p.heads;
  const int token = p.initial[int64_t(batch) * p.num_clusters + cluster];
  const bool exists = token >= 0 && token < p.kv_len;
  const T* key = p.keys.at(batch, head, exists ? token : 0);
  float* centroid = p.centroids.at(batch, head, cluster);
  for (int i = threadIdx.x; i < p.head_dim; i += 128) {
    centroid[i] = exists ? to_float(key[i]) : 0.f;
  }
}

// Which part of an index the clusters take. A new index has them all.
struct IndexTarget {
  Rows<int> indptr;   // [B,Hkv,places+1], from the first cluster's place on
  Rows<int> indices;  // [B,Hkv,capacity]
  int places, capacity, first_token;
  bool is_new;
};

// indptr behind the first cluster's place; places behind the last cluster stay empty. A new index
// also gets its first number, and -1 behind its last token.
template <class T>
__global__ void __launch_bounds__(256)
    clusterkv_write_indptr(const __grid_constant__ ClusteringProblem<T> p,
                           const __grid_constant__ IndexTarget target) {
  const int batch = blockIdx.x / p.heads, head = blockIdx.x % p.heads;
  const int* starts = p.starts + int64_t(blockIdx.x) * (p.num_clusters + 1);
  int* indptr = target.indptr.at(batch, head, 0);
  const int held = target.is_new ? 0 : indptr[0];
  for (int i = threadIdx.x + 1; i <= target.places; i += 256) {
    indptr[i] = held + starts[min(i, p.num_clusters)];
  }
  if (!target.is_new) return;
  if (threadIdx.x == 0) indptr[0] = 0;
  int* indices = target.indices.at(batch, head, 0);
  for (int i = starts[p.num_clusters] + threadIdx.x; i < target.capacity; i += 256) {
    indices[i] = -1;
  }
}

template <class T>
void launch_cluster_keys(const ClusteringProblem<T>& p, const IndexTarget& target, int max_iter,
                         cudaStream_t stream) {
  if (p.lists() == 0 || p.kv_len == 0) return;
  CLUSTERKV_LAUNCH((clusterkv_initial_centroids<T>),
                   dim3(unsigned(p.num_clusters), unsigned(p.lists())), dim3(128), 0, stream, p);
  for (int iteration = 0; iteration < max_iter; ++iteration) {
    launch_assign(p, iteration, stream);
    launch_sort(p, iteration, stream);
    launch_update(p, iteration, stream);
  }
  launch_assign(p, max_iter, stream);
  ClusteringProblem<T> last = p;
  last.changed = nullptr;  // the index is written in any case
  const Rows<int>& rows = target.indptr;
  const Rows<const int> held{target.is_new ? nullptr : rows.data, rows.batch_stride,
                             rows.head_stride, 0};
  launch_sort(last, SortTarget{target.indices, held, target.capacity, target.first_token}, 0,
              stream);
  CLUSTERKV_LAUNCH((clusterkv_write_indptr<T>), dim3(unsigned(p.lists())), dim3(256), 0, stream,
                   last, target);
}

}  // namespace clusterkv
