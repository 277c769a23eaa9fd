// Nearest centroid of every key: a matrix product with the centroids' directions, and an arg-max
// that never writes the [T, C] scores to memory.
//
//   clusterkv_prepare_centroids  grid (C, B * Hkv), 32 threads: directions, split into parts
//
//   clusterkv_assign             grid (ceil(T / 64), B * Hkv), 128 threads
//
//              kClusters at a time, two tiles: one is used while the other arrives
//            +------------+
//            | directions |   parts of padded D each, shared memory
//            +------------+
//    +-----+
//    | keys|   64 tokens, shared memory; a warp takes 16 of them
//    +-----+   and keeps its best score and cluster in registers
//
// A score is x . direction + bias. With centroids as they are and bias -|c|^2 / 2 the same kernel
// would serve L2. Fused instead of tiles through cuBLAS: writing and reading [T, C] float32 scores
// moves 8 T C bytes, against 2 T D for the keys; at C = 1,600 that is 50 times as much.
#pragma once

#include <cmath>

#include "clustering_problem.cuh"
#include "mma.cuh"

namespace clusterkv {

constexpr int kAssignThreads = 128;
constexpr int kAssignTokens = 64;
constexpr int kRowPad = 8;  // elements: fragments of eight rows then lie in different banks

// The `part`-th term of x as a sum of elements.
template <class E>
__device__ __forceinline__ E part_of(float x, int part) {
  E element = from_float<E>(x);
  for (int i = 0; i < part; ++i) {
    x -= to_float(element);
    element = from_float<E>(x);
  }
  return element;
}

template <class T>
__global__ void __launch_bounds__(32)
    clusterkv_prepare_centroids(const __grid_constant__ ClusteringProblem<T> p, int iteration) {
  using E = typename Factors<T>::Element;
  const int cluster = blockIdx.x, list = blockIdx.y, batch = list / p.heads;
  if (!p.needs_labels(iteration, list)) return;
  const float* centroid = p.centroids.at(batch, list % p.heads, cluster);
  float sum = 0.f;
  for (int i = threadIdx.x; i < p.head_dim; i += 32) sum += centroid[i] * centroid[i];
  const float norm = sqrtf(warp_sum(sum));
  const int64_t part_stride = int64_t(p.lists()) * p.num_clusters * p.padded_dim();
  E* row = p.parts + (int64_t(list) * p.num_clusters + cluster) * p.padded_dim();
  for (int i = threadIdx.x; i < p.padded_dim(); i += 32) {
    const float direction = i < p.head_dim && norm > 0.f ? centroid[i] / norm : 0.f;
    for (int part = 0; part < Factors<T>::kCentroidParts; ++part) {
      row[part * part_stride + i] = part_of<E>(direction, part);
    }
  }
  if (threadIdx.x == 0) {
    const bool exists =
        p.initial == nullptr || p.initial[int64_t(batch) * p.num_clusters + cluster] >= 0;
    p.bias[int64_t(list) * p.num_clusters + cluster] = exists ? 0.f : -INFINITY;
  }
}

// Keys of one block and the tiles of directions that pass by, as laid out in shared memory.
template <class T, int kClusters>
struct AssignShared {
  using E = typename Factors<T>::Element;
  static constexpr int kParts = Factors<T>::kCentroidParts;
  T* keys;    // [64, padded D + kRowPad]
  E* tiles;   // [2, parts, kClusters, padded D + kRowPad]
  int width;  // padded D + kRowPad

  __device__ AssignShared(unsigned char* memory, int padded_dim) : width(padded_dim + kRowPad) {
    keys = reinterpret_cast<T*>(memory);
    tiles = reinterpret_cast<E*>(keys + kAssignTokens * width);
  }

  static size_t bytes(int padded_dim) {
    const size_t width = size_t(padded_dim + kRowPad);
    return width * (kAssignTokens * sizeof(T) + 2 * kParts * kClusters * sizeof(E));
  }

  __device__ E* row(int tile, int part, int cluster) const {
    return tiles + ((tile % 2 * kParts + part) * kClusters + cluster) * width;
  }

  // The block's keys; zeros outside `end` and behind head_dim.
  __device__ void load_keys(const ClusteringProblem<T>& p, int list, int first, int end) const {
    const int chunks = p.padded_dim() / Chunk<T>::kSize;
    for (int i = threadIdx.x; i < kAssignTokens * chunks; i += kAssignThreads) {
      const int token = i / chunks, channel = i % chunks * Chunk<T>::kSize;
      const bool is_inside = first + token < end;
      const T* from = p.keys.at(list / p.heads, list % p.heads, is_inside ? first + token : first);
      T* to = keys + token * width + channel;
      if (is_inside && p.is_aligned && channel < p.head_dim) {
        copy_async(to, from + channel);
        continue;
      }
      for (int k = 0; k < Chunk<T>::kSize; ++k) {
        to[k] = is_inside && channel + k < p.head_dim ? from[channel + k] : from_float<T>(0.f);
      }
    }
  }

  // The directions of a tile of clusters; the workspace is aligned and padded.
  __device__ void load_tile(const ClusteringProblem<T>& p, int list, int tile) const {
    const int chunks = p.padded_dim() / Chunk<E>::kSize;
    const int count = min(kClusters, p.num_clusters - tile * kClusters);
    const int64_t part_stride = int64_t(p.lists()) * p.num_clusters * p.padded_dim();
    const E* from = p.parts + (int64_t(list) * p.num_clusters + tile * kClusters) * p.padded_dim();
    for (int i = threadIdx.x; i < kParts * kClusters * chunks; i += kAssignThreads) {
      const int part = i / (kClusters * chunks), cluster = i / chunks % kClusters;
      const int channel = i % chunks * Chunk<E>::kSize;
      E* to = row(tile, part, cluster) + channel;
      if (cluster < count) {
        copy_async(to, from + part * part_stride + int64_t(cluster) * p.padded_dim() + channel);
      } else {
        for (int k = 0; k < Chunk<E>::kSize; ++k) to[k] = from_float<E>(0.f);
      }
    }
  }

  // Two neighbouring channels of a key, as the `part`-th pair of elements.
  __device__ unsigned key_pair(int token, int channel, int part) const {
    const T* at = keys + token * width + channel;
    if constexpr (sizeof(T) == 2) {
      return load_pair(at);
    } else {
      return pack(part_of<E>(at[0], part), part_of<E>(at[1], part));
    }
  }
};

// The best cluster so far of two tokens (rows g and g + 8 of the warp's sixteen).
struct Best {
  float score[2] = {-INFINITY, -INFINITY};
  int cluster[2] = {INT32_MAX, INT32_MAX};

  __device__ void offer(int row, float next, int id) {
    if (next > score[row] || (next == score[row] && id < cluster[row])) {
      score[row] = next;
      cluster[row] = id;
    }
  }

  // The best of the four lanes that share the rows.
  __device__ void merge_lanes() {
    for (int distance = 1; distance < 4; distance *= 2) {
      for (int row = 0; row < 2; ++row) {
        const float other = __shfl_xor_sync(kFullMask, score[row], distance);
        const int id = __shfl_xor_sync(kFullMask, cluster[row], distance);
        offer(row, other, id);
      }
    }
  }
};

// Scores of a warp's tokens against one tile, offered to `best`.
template <class T, int kClusters>
__device__ void score_tile(const ClusteringProblem<T>& p, const AssignShared<T, kClusters>& shared,
                           const float* bias, int tile, Best& best) {
  using F = Factors<T>;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int token = threadIdx.x / 32 * 16 + g;
  float sums[kClusters / 8][4] = {};
  for (int k = 0; k < p.padded_dim(); k += 16) {
    FragmentA keys[F::kKeyParts];
#pragma unroll
    for (int i = 0; i < F::kKeyParts; ++i) {
      keys[i] = {{shared.key_pair(token, k + 2 * t, i), shared.key_pair(token + 8, k + 2 * t, i),
                  shared.key_pair(token, k + 2 * t + 8, i),
                  shared.key_pair(token + 8, k + 2 * t + 8, i)}};
    }
#pragma unroll
    for (int n = 0; n < kClusters / 8; ++n) {
#pragma unroll
      for (int j = F::kCentroidParts - 1; j >= 0; --j) {
        const auto* row = shared.row(tile, j, n * 8 + g) + k + 2 * t;
        const FragmentB directions{{load_pair(row), load_pair(row + 8)}};
#pragma unroll
        for (int i = 0; i < F::kKeyParts && i + j < F::kCentroidParts; ++i) {
          multiply_add<typename F::Element>(sums[n], keys[i], directions);
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kClusters / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int cluster = tile * kClusters + n * 8 + 2 * t + i % 2;
      if (cluster < p.num_clusters) best.offer(i / 2, sums[n][i] + bias[cluster], cluster);
    }
  }
}

// Labels of the block's tokens; raises `changed` when one differs from the last iteration's.
template <class T>
__device__ void store_labels(const ClusteringProblem<T>& p, const Best& best, int iteration,
                             int list, int first, int begin, int end) {
  const int lane = threadIdx.x % 32;
  bool is_new = false;
  for (int row = 0; row < 2; ++row) {
    const int token = first + int(threadIdx.x) / 32 * 16 + lane / 4 + row * 8;
    if (lane % 4 != 0 || token >= p.kv_len) continue;
    const int found = best.cluster[row] < p.num_clusters ? best.cluster[row] : 0;
    int* label = p.labels + int64_t(list) * p.kv_len + token;
    const int next = token >= begin && token < end ? found : -1;
    is_new = is_new || iteration == 0 || *label != next;
    *label = next;
  }
  const bool any_new = __any_sync(kFullMask, is_new);
  if (p.changed != nullptr && any_new && lane == 0) {
    atomicOr(&p.changed[iteration * p.lists() + list], 1);
  }
}

template <class T, int kClusters>
__global__ void __launch_bounds__(kAssignThreads)
    clusterkv_assign(const __grid_constant__ ClusteringProblem<T> p, int iteration) {
  CLUSTERKV_SHARED(memory);
  const int list = blockIdx.y, first = blockIdx.x * kAssignTokens;
  if (!p.needs_labels(iteration, list)) return;
  const int begin = p.begin(list / p.heads), end = p.end(list / p.heads);
  Best best;
  if (first < end && first + kAssignTokens > begin) {
    const AssignShared<T, kClusters> shared(memory, p.padded_dim());
    const float* bias = p.bias + int64_t(list) * p.num_clusters;
    const int num_tiles = int(ceil_div(p.num_clusters, kClusters));
    shared.load_keys(p, list, first, end);
    shared.load_tile(p, list, 0);
    copy_async_commit();
    for (int tile = 0; tile < num_tiles; ++tile) {
      if (tile + 1 < num_tiles) shared.load_tile(p, list, tile + 1);
      copy_async_commit();
      copy_async_wait<1>();
      __syncthreads();
      score_tile(p, shared, bias, tile, best);
      __syncthreads();
    }
    copy_async_wait<0>();
    best.merge_lanes();
  }
  store_labels(p, best, iteration, list, first, begin, end);
}

template <class T, int kClusters>
bool launch_assign_tiles(const ClusteringProblem<T>& p, int iteration, cudaStream_t stream) {
  const size_t bytes = AssignShared<T, kClusters>::bytes(p.padded_dim());
  if (bytes > kMaxSharedBytes) return false;
  const dim3 grid(unsigned(ceil_div(p.kv_len, kAssignTokens)), unsigned(p.lists()));
  CLUSTERKV_LAUNCH((clusterkv_assign<T, kClusters>), grid, dim3(kAssignThreads), bytes, stream, p,
                   iteration);
  return true;
}

// Labels for the present centroids. Tiles as wide as shared memory allows: 32 clusters up to a
// head_dim of 128, 16 or (float32) 8 at 256.
template <class T>
void launch_assign(const ClusteringProblem<T>& p, int iteration, cudaStream_t stream) {
  CLUSTERKV_LAUNCH((clusterkv_prepare_centroids<T>),
                   dim3(unsigned(p.num_clusters), unsigned(p.lists())), dim3(32), 0, stream, p,
                   iteration);
  if (launch_assign_tiles<T, 32>(p, iteration, stream)) return;
  if (launch_assign_tiles<T, 16>(p, iteration, stream)) return;
  launch_assign_tiles<T, 8>(p, iteration, stream);
}

}  // namespace clusterkv
