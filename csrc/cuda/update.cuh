// The mean of each cluster's raw keys. Tokens come sorted by cluster, so no two threads ever add
// to the same sum and the result is the same in any order of execution.
//
//   clusterkv_update_centroids  grid (C, B * Hkv), 256 threads: one block a cluster
//
//     thread (x, y)   x = one of kParts parts of the channels, y = every (256 / kParts)-th token
//     then            the partial sums of each channel are added in the order of y
//
// The paper's kernel takes one block a head with threads strided along the whole sequence and
// atomic additions; its P is kParts here. Atomic additions of floats come in any order, and then
// clustering beside the model's work would not equal clustering before it.
// Sums are float64: as in the oracle, the mean rounded to float32 hides the order of additions.
#pragma once

#include "clustering_problem.cuh"

namespace clusterkv {

constexpr int kUpdateThreads = 256;
constexpr int kDefaultParts = 16;

template <class T, int kParts>
__global__ void __launch_bounds__(kUpdateThreads)
    clusterkv_update_centroids(const __grid_constant__ ClusteringProblem<T> p, int iteration) {
  constexpr int kChannels = kMaxHeadDim / kParts, kStrides = kUpdateThreads / kParts;
  CLUSTERKV_SHARED(memory);
  double* partial = reinterpret_cast<double*>(memory);  // [kStrides, D]
  const int cluster = blockIdx.x, list = blockIdx.y;
  if (!p.needs_update(iteration, list)) return;
  const int* starts = p.starts + int64_t(list) * (p.num_clusters + 1) + cluster;
  const int begin = starts[0], end = starts[1];
  if (begin == end) return;

  const int x = threadIdx.x % kParts, y = threadIdx.x / kParts;
  const int width = int(ceil_div(p.head_dim, kParts)), first = x * width;
  const int count = max(min(width, p.head_dim - first), 0);
  const int* order = p.order + int64_t(list) * p.kv_len;
  double sums[kChannels] = {};
  for (int i = begin + y; i < end; i += kStrides) {
    const T* key = p.keys.at(list / p.heads, list % p.heads, order[i]) + first;
#pragma unroll
    for (int k = 0; k < kChannels; ++k) {
      if (k < count) sums[k] += double(to_float(key[k]));
    }
  }
#pragma unroll
  for (int k = 0; k < kChannels; ++k) {
    if (k < count) partial[y * p.head_dim + first + k] = sums[k];
  }
  __syncthreads();
  float* centroid = p.centroids.at(list / p.heads, list % p.heads, cluster);
  for (int channel = threadIdx.x; channel < p.head_dim; channel += kUpdateThreads) {
    double sum = 0;
    for (int k = 0; k < kStrides; ++k) sum += partial[k * p.head_dim + channel];
    centroid[channel] = float(sum / double(end - begin));
  }
}

template <class T, int kParts = kDefaultParts>
void launch_update(const ClusteringProblem<T>& p, int iteration, cudaStream_t stream) {
  const size_t bytes = size_t(kUpdateThreads / kParts) * size_t(p.head_dim) * sizeof(double);
  CLUSTERKV_LAUNCH((clusterkv_update_centroids<T, kParts>),
                   dim3(unsigned(p.num_clusters), unsigned(p.lists())), dim3(kUpdateThreads), bytes,
                   stream, p, iteration);
}

}  // namespace clusterkv
