// Ranking of clusters by a query, and expansion of the best ones into tokens up to the budget.
//
//   clusterkv_score_clusters   grid (ceil(C / 64), B * Hkv), 256 threads
//
//     A warp takes a cluster at a time: lanes hold its centroid, which is read once for all query
//     heads of the group. Writes q . centroid to scores [B,Hq,C].
//
//   clusterkv_select_clusters  grid (B * Hs), 512 threads: one block ranks for one selecting head
//
//     rank      order-preserving 54-bit keys: score descending, then cluster id ascending
//     cut       the key at which the running size reaches the budget, by a histogram of sizes over
//               digits of the key (five passes), so that C clusters are never sorted
//     sort      the clusters up to the cut, which are at most `budget`: bitonic
//     expand    a place of the output finds its cluster by bisection of the running sizes
//
// Ranks, sizes and the sorted list live in shared memory when they fit, else in a workspace.
// Variant not taken: a bitonic sort of all clusters; 105 passes over 16,384 of them.
#pragma once

#include <cmath>

#include "device.cuh"

namespace clusterkv {

constexpr int kScoreThreads = 256;
constexpr int kClustersPerBlock = 64;
constexpr int kSelectThreads = 512;
constexpr int kIdBits = 22;
constexpr int kMaxClusters = 1 << kIdBits;
constexpr int kDigits = 5;
constexpr int kBins = 2048;
constexpr size_t kSelectSharedBytes = 48 << 10;

// CSR rows and their clusters' centroids, as the index stores them.
struct IndexView {
  Rows<const float> centroids;  // [B,Hkv,C,D]
  Rows<const int> indptr;       // [B,Hkv,C+1]
  Rows<const int> indices;      // [B,Hkv,T]
  int num_clusters, kv_len;
};

template <class T>
struct SelectionProblem {
  Rows<const T> query;  // [B,Hq,1,D]
  IndexView index;
  float* scores;             // [B,Hq,C]
  unsigned char* workspace;  // per block, where shared memory is too small; else null
  int* indices;              // [B,Hs,budget]
  int* num_selected;         // [B,Hs]
  int batch, num_qo_heads, num_kv_heads, head_dim, budget;
  float scale;
  bool is_per_query_head;
};

template <class T>
__global__ void __launch_bounds__(kScoreThreads)
    clusterkv_score_clusters(const __grid_constant__ SelectionProblem<T> p) {
  constexpr int kHeadsAtOnce = 8, kPerLane = kMaxHeadDim / 32;
  __shared__ float query[kHeadsAtOnce][kMaxHeadDim];
  const int batch = blockIdx.y / p.num_kv_heads, kv_head = blockIdx.y % p.num_kv_heads;
  const int group_size = p.num_qo_heads / p.num_kv_heads;
  const int lane = threadIdx.x % 32, num_warps = kScoreThreads / 32;
  const int begin = blockIdx.x * kClustersPerBlock;
  const int end = min(begin + kClustersPerBlock, p.index.num_clusters);
  for (int first = 0; first < group_size; first += kHeadsAtOnce) {
    const int heads = min(kHeadsAtOnce, group_size - first);
    __syncthreads();
    for (int i = threadIdx.x; i < heads * p.head_dim; i += kScoreThreads) {
      const int head = kv_head * group_size + first + i / p.head_dim;
      query[i / p.head_dim][i % p.head_dim] = to_float(p.query.at(batch, head, 0)[i % p.head_dim]);
    }
    __syncthreads();
    for (int cluster = begin + threadIdx.x / 32; cluster < end; cluster += num_warps) {
      const float* centroid = p.index.centroids.at(batch, kv_head, cluster);
      float mine[kPerLane];
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        mine[i] = lane + 32 * i < p.head_dim ? centroid[lane + 32 * i] : 0.f;
      }
      for (int h = 0; h < heads; ++h) {
        float score = 0.f;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
          if (lane + 32 * i < p.head_dim) score += mine[i] * query[h][lane + 32 * i];
        }
        score = warp_sum(score);
        const int64_t head = int64_t(batch) * p.num_qo_heads + kv_head * group_size + first + h;
        if (lane == 0) p.scores[head * p.index.num_clusters + cluster] = score;
      }
    }
  }
}

// Larger floats to larger integers; both zeros to the same one.
__device__ __forceinline__ unsigned rank_of(float score) {
  const unsigned bits = __float_as_uint(score + 0.f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// What one block ranks: its arrays, in shared memory or in its part of the workspace.
struct Ranking {
  unsigned* ranks;           // [C]
  int* sizes;                // [C], 0: empty
  unsigned long long* list;  // [capacity], the keys of the chosen clusters, best first
  int* ends;                 // [capacity], running sizes of the list
  int num_clusters, capacity;

  // Clusters that a budget can choose, as a power of two for the bitonic sort.
  __host__ __device__ static int capacity_of(int num_clusters, int budget) {
    int capacity = 1;
    while (capacity < min(num_clusters, budget)) capacity *= 2;
    return capacity;
  }

  __host__ __device__ static size_t bytes_of(int num_clusters, int budget) {
    const size_t capacity = size_t(capacity_of(num_clusters, budget));
    return capacity * 12 + size_t(round_up(num_clusters, 4)) * 8;
  }

  __device__ Ranking(unsigned char* memory, int clusters, int budget)
      : num_clusters(clusters), capacity(capacity_of(clusters, budget)) {
    list = reinterpret_cast<unsigned long long*>(memory);
    ends = reinterpret_cast<int*>(list + capacity);
    ranks = reinterpret_cast<unsigned*>(ends + capacity);
    sizes = reinterpret_cast<int*>(ranks + round_up(clusters, 4));
  }

  __device__ unsigned long long key(int cluster) const {
    return (static_cast<unsigned long long>(ranks[cluster]) << kIdBits) |
           static_cast<unsigned>(kMaxClusters - 1 - cluster);
  }

  __device__ static int cluster_of(unsigned long long key) {
    return kMaxClusters - 1 - int(key & (kMaxClusters - 1));
  }
};

// Sizes of a row's clusters. Nonsense in `indptr` can't lead outside `indices`.
__device__ inline int begin_of(const int* indptr, int cluster, int kv_len) {
  return min(max(indptr[cluster], 0), kv_len);
}

__device__ inline int size_of(const int* indptr, int cluster, int kv_len) {
  return max(begin_of(indptr, cluster + 1, kv_len) - begin_of(indptr, cluster, kv_len), 0);
}

// Rank by one head's inner products.
__device__ inline void rank_by_score(Ranking& r, const float* scores) {
  for (int c = threadIdx.x; c < r.num_clusters; c += kSelectThreads) {
    r.ranks[c] = rank_of(scores[c]);
  }
}

// Rank by the softmax mass a token of the cluster gets from the whole group, as if each token had
// its centroid's key: sum over heads of softmax(scale * score + log size) / size.
__device__ inline void rank_by_mass(Ranking& r, const float* scores, int group_size, float scale) {
  for (int c = threadIdx.x; c < r.num_clusters; c += kSelectThreads) r.ranks[c] = 0;
  for (int head = 0; head < group_size; ++head, scores += r.num_clusters) {
    float largest = -INFINITY;
    for (int c = threadIdx.x; c < r.num_clusters; c += kSelectThreads) {
      if (r.sizes[c] > 0) largest = fmaxf(largest, scale * scores[c] + logf(float(r.sizes[c])));
    }
    largest = block_max(largest);
    float sum = 0.f;
    for (int c = threadIdx.x; c < r.num_clusters; c += kSelectThreads) {
      if (r.sizes[c] > 0) sum += expf(scale * scores[c] + logf(float(r.sizes[c])) - largest);
    }
    sum = block_sum(sum);
    for (int c = threadIdx.x; c < r.num_clusters; c += kSelectThreads) {
      if (r.sizes[c] == 0) continue;
      const float mass = expf(scale * scores[c] + logf(float(r.sizes[c])) - largest) / sum;
      r.ranks[c] = __float_as_uint(__uint_as_float(r.ranks[c]) + mass);
    }
  }
  for (int c = threadIdx.x; c < r.num_clusters; c += kSelectThreads) {
    const float mass = __uint_as_float(r.ranks[c]);
    r.ranks[c] = r.sizes[c] > 0 ? rank_of(mass / float(r.sizes[c])) : 0;
  }
}

// The digit of the cut: bins from the largest down, until their sizes reach `remaining`. Subtracts
// what lies above that digit from `remaining`.
__device__ inline int find_digit(const int* histogram, int* remaining) {
  constexpr int kPerThread = kBins / kSelectThreads;
  __shared__ int digit, taken;
  const int top = kBins - 1 - int(threadIdx.x) * kPerThread;
  int mine = 0, total;
  for (int i = 0; i < kPerThread; ++i) mine += histogram[top - i];
  int above = block_exclusive_sum(mine, &total);
  for (int i = 0; i < kPerThread; ++i) {
    const int next = above + histogram[top - i];
    if (above < *remaining && next >= *remaining) {
      digit = top - i;
      taken = above;
    }
    above = next;
  }
  __syncthreads();
  *remaining -= taken;
  return digit;
}

// The smallest key that is still chosen. Sizes add up to at least `budget`.
__device__ inline unsigned long long find_cut(const Ranking& r, int budget) {
  __shared__ int histogram[kBins];
  constexpr int kShift[kDigits] = {43, 32, 22, 11, 0};
  constexpr int kWidth[kDigits] = {11, 11, 10, 11, 11};
  unsigned long long prefix = 0;
  int remaining = budget;
#pragma unroll
  for (int digit = 0; digit < kDigits; ++digit) {
    for (int i = threadIdx.x; i < kBins; i += kSelectThreads) histogram[i] = 0;
    __syncthreads();
    const unsigned mask = (1u << kWidth[digit]) - 1;
    for (int c = threadIdx.x; c < r.num_clusters; c += kSelectThreads) {
      const unsigned long long key = r.key(c) >> kShift[digit];
      if (r.sizes[c] > 0 && key >> kWidth[digit] == prefix) {
        atomicAdd(&histogram[unsigned(key) & mask], r.sizes[c]);
      }
    }
    __syncthreads();
    prefix = prefix << kWidth[digit] | unsigned(find_digit(histogram, &remaining));
    __syncthreads();
  }
  return prefix;
}

// The keys from the cut on, in any order; returns how many.
__device__ inline int collect(const Ranking& r, unsigned long long cut) {
  __shared__ int count;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  for (int c = threadIdx.x; c < r.num_clusters; c += kSelectThreads) {
    const unsigned long long key = r.key(c);
    if (r.sizes[c] > 0 && key >= cut) {
      const int place = atomicAdd(&count, 1);
      if (place < r.capacity) r.list[place] = key;
    }
  }
  __syncthreads();
  return min(count, r.capacity);
}

// Descending bitonic sort of `count` keys, padded with zeros to a power of two.
__device__ inline void sort_descending(unsigned long long* list, int count) {
  int size = 1;
  while (size < count) size *= 2;
  for (int i = count + threadIdx.x; i < size; i += kSelectThreads) list[i] = 0;
  for (int width = 2; width <= size; width *= 2) {
    for (int distance = width / 2; distance > 0; distance /= 2) {
      __syncthreads();
      for (int i = threadIdx.x; i < size / 2; i += kSelectThreads) {
        const int low = 2 * i - (i & (distance - 1)), high = low + distance;
        const bool is_descending = (low & width) == 0;
        const unsigned long long a = list[low], b = list[high];
        if ((a < b) == is_descending) {
          list[low] = b;
          list[high] = a;
        }
      }
    }
  }
  __syncthreads();
}

// Running sizes of the sorted clusters; returns their sum.
__device__ inline int accumulate_sizes(const Ranking& r, int count) {
  int before = 0;
  for (int first = 0; first < count; first += kSelectThreads) {
    const int i = first + threadIdx.x;
    const int size = i < count ? r.sizes[Ranking::cluster_of(r.list[i])] : 0;
    int total;
    const int below = block_exclusive_sum(size, &total);
    if (i < count) r.ends[i] = before + below + size;
    before += total;
  }
  __syncthreads();
  return before;
}

// The sum of all sizes, no larger than a budget can be.
__device__ inline int64_t total_size(const Ranking& r) {
  int64_t sum = 0;
  for (int first = 0; first < r.num_clusters; first += kSelectThreads) {
    const int c = first + threadIdx.x;
    int total;
    block_exclusive_sum(c < r.num_clusters ? r.sizes[c] : 0, &total);
    sum += total;
  }
  return sum;
}

// Writes tokens cluster by cluster, -1 behind them.
__device__ inline void expand(const Ranking& r, int count, int num_tokens, int budget,
                              const int* indptr, const int* indices, int kv_len, int* out) {
  for (int place = threadIdx.x; place < budget; place += kSelectThreads) {
    int token = -1;
    if (place < num_tokens) {
      int low = 0, high = count - 1;  // the first cluster that ends behind the place
      while (low < high) {
        const int middle = (low + high) / 2;
        if (r.ends[middle] > place) {
          high = middle;
        } else {
          low = middle + 1;
        }
      }
      const int cluster = Ranking::cluster_of(r.list[low]);
      const int begin_in_output = r.ends[low] - r.sizes[cluster];
      token = indices[begin_of(indptr, cluster, kv_len) + place - begin_in_output];
    }
    out[place] = token;
  }
}

template <class T>
__global__ void __launch_bounds__(kSelectThreads, 1)
    clusterkv_select_clusters(const __grid_constant__ SelectionProblem<T> p) {
  CLUSTERKV_SHARED(shared);
  const int num_clusters = p.index.num_clusters, kv_len = p.index.kv_len;
  const int group_size = p.num_qo_heads / p.num_kv_heads;
  const int select_heads = p.is_per_query_head ? p.num_qo_heads : p.num_kv_heads;
  const int batch = blockIdx.x / select_heads, head = blockIdx.x % select_heads;
  const int kv_head = p.is_per_query_head ? head / group_size : head;
  const int* indptr = p.index.indptr.at(batch, kv_head, 0);
  const int* indices = p.index.indices.at(batch, kv_head, 0);
  const int first_head = p.is_per_query_head ? head : head * group_size;
  const float* scores =
      p.scores + (int64_t(batch) * p.num_qo_heads + first_head) * int64_t(num_clusters);

  const size_t bytes = size_t(round_up(int64_t(Ranking::bytes_of(num_clusters, p.budget)), 16));
  Ranking ranking(p.workspace ? p.workspace + blockIdx.x * bytes : shared, num_clusters, p.budget);
  for (int c = threadIdx.x; c < num_clusters; c += kSelectThreads) {
    ranking.sizes[c] = size_of(indptr, c, kv_len);
  }
  if (p.is_per_query_head) {
    rank_by_score(ranking, scores);
  } else {
    rank_by_mass(ranking, scores, group_size, p.scale);
  }
  __syncthreads();
  const bool fits = total_size(ranking) <= p.budget;
  const unsigned long long cut = fits ? 0 : find_cut(ranking, p.budget);
  const int count = collect(ranking, cut);
  sort_descending(ranking.list, count);
  const int num_tokens = min(accumulate_sizes(ranking, count), p.budget);
  int* out = p.indices + int64_t(blockIdx.x) * p.budget;
  expand(ranking, count, num_tokens, p.budget, indptr, indices, kv_len, out);
  if (threadIdx.x == 0) p.num_selected[blockIdx.x] = num_tokens;
}

// -- launches -----------------------------------------------------------------------------------

// Bytes that all blocks together need outside shared memory.
inline int64_t selection_workspace_bytes(int num_clusters, int budget, int64_t blocks) {
  const int64_t bytes = round_up(int64_t(Ranking::bytes_of(num_clusters, budget)), 16);
  return bytes <= int64_t(kSelectSharedBytes) - (12 << 10) ? 0 : bytes * blocks;
}

template <class T>
void launch_select_clusters(const SelectionProblem<T>& p, cudaStream_t stream) {
  const int select_heads = p.is_per_query_head ? p.num_qo_heads : p.num_kv_heads;
  if (p.batch * select_heads == 0) return;
  if (p.index.num_clusters > 0) {
    const dim3 grid(unsigned(ceil_div(p.index.num_clusters, kClustersPerBlock)),
                    unsigned(p.batch * p.num_kv_heads));
    CLUSTERKV_LAUNCH((clusterkv_score_clusters<T>), grid, dim3(kScoreThreads), 0, stream, p);
  }
  const size_t bytes = p.workspace ? 0 : Ranking::bytes_of(p.index.num_clusters, p.budget);
  CLUSTERKV_LAUNCH((clusterkv_select_clusters<T>), dim3(unsigned(p.batch * select_heads)),
                   dim3(kSelectThreads), size_t(round_up(int64_t(bytes), 16)), stream, p);
}

}  // namespace clusterkv
