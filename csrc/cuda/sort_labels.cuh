// Labels to compressed sparse rows: a counting sort that keeps tokens ascending in each cluster.
//
//   tokens     | tile 0 | tile 1 | ...  at most 64 tiles a (batch, head)
//   count      grid (tiles, B * Hkv), 256 threads: tokens of each cluster in the tile
//   scan       grid (B * Hkv), 512 threads: where each tile's share of each cluster starts
//   scatter    grid (tiles, B * Hkv), one warp: 32 tokens at a time, in order; equal labels among
//              them are found by __match_any_sync and numbered by lane
//
// Everything is integer, so the result is the same in any order of execution.
#pragma once

#include "clustering_problem.cuh"

namespace clusterkv {

constexpr int kCountThreads = 256;
constexpr int kScanThreads = 512;
constexpr size_t kScatterSharedBytes = 48 << 10;

template <class T>
__global__ void __launch_bounds__(kCountThreads)
    clusterkv_count_labels(const __grid_constant__ ClusteringProblem<T> p, int iteration) {
  const int list = blockIdx.y, tile = blockIdx.x;
  if (!p.needs_update(iteration, list)) return;
  int* counts = p.counts + (int64_t(list) * gridDim.x + tile) * p.num_clusters;
  for (int c = threadIdx.x; c < p.num_clusters; c += kCountThreads) counts[c] = 0;
  __syncthreads();
  const int* labels = p.labels + int64_t(list) * p.kv_len;
  const int end = min((tile + 1) * p.sort_tile(), p.kv_len);
  for (int token = tile * p.sort_tile() + threadIdx.x; token < end; token += kCountThreads) {
    const int label = labels[token];
    if (label >= 0 && label < p.num_clusters) atomicAdd(&counts[label], 1);
  }
}

template <class T>
__global__ void __launch_bounds__(kScanThreads)
    clusterkv_scan_counts(const __grid_constant__ ClusteringProblem<T> p, int iteration) {
  const int list = blockIdx.x, tiles = p.sort_tiles();
  if (!p.needs_update(iteration, list)) return;
  int* counts = p.counts + int64_t(list) * tiles * p.num_clusters;
  int* starts = p.starts + int64_t(list) * (p.num_clusters + 1);
  int before = 0;
  for (int first = 0; first < p.num_clusters; first += kScanThreads) {
    const int cluster = first + threadIdx.x;
    const bool is_inside = cluster < p.num_clusters;
    int size = 0, total;
    for (int tile = 0; is_inside && tile < tiles; ++tile) {
      size += counts[int64_t(tile) * p.num_clusters + cluster];
    }
    int place = before + block_exclusive_sum(size, &total);
    if (is_inside) starts[cluster] = place;
    for (int tile = 0; is_inside && tile < tiles; ++tile) {
      int* count = &counts[int64_t(tile) * p.num_clusters + cluster];
      const int next = place + *count;
      *count = place;
      place = next;
    }
    before += total;
  }
  if (threadIdx.x == 0) starts[p.num_clusters] = before;
}

// Where the sorted tokens go: row (batch, head) starts at its `held`-th place.
struct SortTarget {
  Rows<int> tokens;           // [B,Hkv,capacity]
  Rows<const int> held;       // [B,Hkv,.]: the first number of each row; null data: 0
  int capacity, first_token;  // the latter is added to every token
};

template <class T>
__global__ void __launch_bounds__(32)
    clusterkv_scatter_tokens(const __grid_constant__ ClusteringProblem<T> p,
                             const __grid_constant__ SortTarget target, int iteration,
                             bool has_shared) {
  CLUSTERKV_SHARED(memory);
  const int list = blockIdx.y, tile = blockIdx.x, lane = threadIdx.x;
  if (!p.needs_update(iteration, list)) return;
  int* places = p.counts + (int64_t(list) * gridDim.x + tile) * p.num_clusters;
  if (has_shared) {
    int* copy = reinterpret_cast<int*>(memory);
    for (int c = lane; c < p.num_clusters; c += 32) copy[c] = places[c];
    places = copy;
  }
  __syncwarp();
  const int batch = list / p.heads, head = list % p.heads;
  const int held = target.held.data == nullptr ? 0 : *target.held.at(batch, head, 0);
  int* out = target.tokens.at(batch, head, 0);
  const int* labels = p.labels + int64_t(list) * p.kv_len;
  const int end = min((tile + 1) * p.sort_tile(), p.kv_len);
  for (int first = tile * p.sort_tile(); first < end; first += 32) {
    const int token = first + lane;
    const int read = token < end ? labels[token] : -1;
    const int label = read < p.num_clusters ? read : -1;
    const unsigned peers = __match_any_sync(kFullMask, label);
    const int leader = __ffs(int(peers)) - 1;
    int place = label >= 0 && lane == leader ? places[label] : 0;
    if (label >= 0 && lane == leader) places[label] = place + __popc(peers);
    place = __shfl_sync(kFullMask, place, leader) + __popc(peers & ((1u << lane) - 1));
    const int64_t to = int64_t(held) + place;
    if (label >= 0 && to >= 0 && to < target.capacity) out[to] = token + target.first_token;
    __syncwarp();
  }
}

template <class T>
void launch_sort(const ClusteringProblem<T>& p, const SortTarget& target, int iteration,
                 cudaStream_t stream) {
  const dim3 grid(unsigned(p.sort_tiles()), unsigned(p.lists()));
  const size_t bytes = size_t(p.num_clusters) * sizeof(int);
  const bool has_shared = bytes <= kScatterSharedBytes;
  CLUSTERKV_LAUNCH((clusterkv_count_labels<T>), grid, dim3(kCountThreads), 0, stream, p, iteration);
  CLUSTERKV_LAUNCH((clusterkv_scan_counts<T>), dim3(unsigned(p.lists())), dim3(kScanThreads), 0,
                   stream, p, iteration);
  CLUSTERKV_LAUNCH((clusterkv_scatter_tokens<T>), grid, dim3(32), has_shared ? bytes : 0, stream, p,
                   target, iteration, has_shared);
}

// Into the workspace, for the next update.
template <class T>
void launch_sort(const ClusteringProblem<T>& p, int iteration, cudaStream_t stream) {
  const Rows<int> order{p.order, int64_t(p.heads) * p.kv_len, p.kv_len, 0};
  launch_sort(p, SortTarget{order, {}, p.kv_len, 0}, iteration, stream);
}

}  // namespace clusterkv
