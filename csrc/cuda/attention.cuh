// Attention of one query token over sinks, recent tokens and selected tokens, without gathering
// them first; also the dense decode kernel, when the recent span covers everything.
//
// The tokens of a row and head form one list: sink span, recent span, selection. The list is cut
// into splits, each by its own block; a second kernel merges the partial softmaxes.
//
//   clusterkv_attention_split   grid (B * units, splits), 128 threads
//
//     unit   = a KV head and the query heads of its group that share the list (one pass over K and
//              V for all of them), or one query head when each has its own selection
//     block  = tokens x head groups x lanes     (z, y, x; x runs fastest)
//                  |         |          `- kLanes threads share a row: kChunks x 16 bytes each
//                  |         `- each for kHeads query heads, held in registers
//                  `- Z tokens at a time, 4 of them per step of the online softmax
//     tile   = 4 * 128 / kLanes tokens of K and V in shared memory, two tiles: while one is used
//              the other arrives by asynchronous copies; positions are read one tile earlier
//
//   clusterkv_attention_merge   grid (B * Hq), 128 threads: splits in order, channels across
//   threads
//
// The length of a split depends on the length of the list alone, so a row's result doesn't depend
// on its neighbours, and rows read from slots give the same bits as rows read in place.
#pragma once

#include "attention_state.cuh"

namespace clusterkv {

constexpr int kMaxSplits = 64;
constexpr int kMinTokensPerSplit = 64;

// At 152 to 163 registers, three blocks of four heads a thread fit a multiprocessor; without the
// bound ptxas spills for a fourth.
template <class T, int kLanes, int kChunks, int kHeads>
__global__ void __launch_bounds__(kAttentionThreads, kHeads == 4 ? 3 : 4)
    clusterkv_attention_split(const __grid_constant__ AttentionProblem<T> p) {
  using State = SoftmaxState<T, kLanes, kChunks, kHeads>;
  using Tiles = AttentionTiles<T, kLanes, kChunks>;
  CLUSTERKV_SHARED(memory);
  Tiles& tiles = *reinterpret_cast<Tiles*>(memory);
  const AttentionUnit<T> unit(p, blockIdx.x);
  const int64_t first_row = int64_t(unit.batch) * p.num_qo_heads + unit.first_head;

  const int per_split = max(kMinTokensPerSplit,
                            int(round_up(ceil_div(unit.list_length, kMaxSplits), Tiles::kTokens)));
  const int first = int(min(int64_t(blockIdx.y) * per_split, int64_t(unit.list_length)));
  const int last = min(first + per_split, unit.list_length);
  if (first == last) {
    if (int(threadIdx.x) < unit.num_heads) {
      p.partial_lse[(first_row + threadIdx.x) * p.splits + blockIdx.y] = -INFINITY;
    }
    return;
  }

  const int num_y = int(ceil_div(p.heads_per_unit, kHeads));
  const int num_z = kAttentionThreads / (kLanes * num_y);
  const int x = threadIdx.x % kLanes, y = threadIdx.x / kLanes % num_y;
  const int z = threadIdx.x / (kLanes * num_y);
  const int num_tiles = int(ceil_div(last - first, Tiles::kTokens));
  const int mine = first + threadIdx.x;  // this thread looks up the tokens mine + tile * kTokens
  auto look_up = [&](int tile) {
    const int i = mine + tile * Tiles::kTokens;
    return i < last ? unit.place(i) : TokenPlace{-1, -1};
  };
  const bool is_scout = threadIdx.x < Tiles::kTokens;

  State state;
  state.begin(unit, x, y * kHeads);
  if (is_scout) {
    tiles.places[0][threadIdx.x] = look_up(0);
    tiles.places[1][threadIdx.x] = look_up(1);
  }
  __syncthreads();
  tiles.load(unit, 0);
  copy_async_commit();
  for (int tile = 0; tile < num_tiles; ++tile) {
    if (tile + 1 < num_tiles) tiles.load(unit, tile + 1);
    copy_async_commit();
    const TokenPlace next = is_scout ? look_up(tile + 2) : TokenPlace{-1, -1};
    copy_async_wait<1>();
    __syncthreads();
    state.attend(unit, tiles.tiles[tile % 2], tiles.places[tile % 3], x, y * kHeads, z, num_z);
    if (is_scout) tiles.places[(tile + 2) % 3][threadIdx.x] = next;
    __syncthreads();
  }
  copy_async_wait<0>();
  __syncthreads();
  store_partial(state, reinterpret_cast<float*>(memory), kLanes, kHeads, x, y, z, num_y, num_z,
                unit.num_heads, p.head_dim, first_row, p.splits, p.partial_out, p.partial_lse);
}

template <class T>
__global__ void __launch_bounds__(kAttentionThreads)
    clusterkv_attention_merge(const __grid_constant__ AttentionProblem<T> p) {
  const float* lse = p.partial_lse + int64_t(blockIdx.x) * p.splits;
  const float* parts = p.partial_out + int64_t(blockIdx.x) * p.splits * p.head_dim;
  float largest = -INFINITY, sum = 0.f;
  for (int i = 0; i < p.splits; ++i) largest = fmaxf(largest, lse[i]);
  const float base = largest == -INFINITY ? 0.f : largest;
  for (int i = 0; i < p.splits; ++i) sum += exp2f(lse[i] - base);
  for (int channel = threadIdx.x; channel < p.head_dim; channel += kAttentionThreads) {
    float out = 0.f;
    for (int i = 0; i < p.splits; ++i) {
      const float weight = exp2f(lse[i] - base);
      if (weight != 0.f) out += weight * parts[int64_t(i) * p.head_dim + channel];
    }
    p.out[int64_t(blockIdx.x) * p.head_dim + channel] = from_float<T>(sum == 0.f ? 0.f : out / sum);
  }
  if (threadIdx.x == 0) p.lse[blockIdx.x] = (largest + log2f(sum)) * kLn2;
}

// The union of two disjoint parts. One thread a channel of [rows, head_dim].
template <class T>
__global__ void clusterkv_merge_states(const T* out_a, const float* lse_a, const T* out_b,
                                       const float* lse_b, T* out, float* lse, int64_t rows,
                                       int head_dim) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= rows * head_dim) return;
  const float a = lse_a[i / head_dim], b = lse_b[i / head_dim];
  const float largest = fmaxf(a, b), base = largest == -INFINITY ? 0.f : largest;
  const float weight_a = expf(a - base), weight_b = expf(b - base), sum = weight_a + weight_b;
  const float part_a = weight_a == 0.f ? 0.f : weight_a * to_float(out_a[i]);
  const float part_b = weight_b == 0.f ? 0.f : weight_b * to_float(out_b[i]);
  out[i] = from_float<T>(sum == 0.f ? 0.f : (part_a + part_b) / sum);
  if (i % head_dim == 0) lse[i / head_dim] = largest + logf(sum);
}

// -- launches -----------------------------------------------------------------------------------

// Splits that the longest possible list needs.
inline int attention_splits(int64_t kv_len, int64_t num_selected) {
  const int64_t needed = ceil_div(2 * kv_len + num_selected, kMinTokensPerSplit);
  return int(needed < 1 ? 1 : needed < kMaxSplits ? needed : kMaxSplits);
}

template <class T, int kLanes, int kChunks, int kHeads>
void launch_attention_split(AttentionProblem<T> p, int heads_together, cudaStream_t stream) {
  using State = SoftmaxState<T, kLanes, kChunks, kHeads>;
  const int group_size = p.num_qo_heads / p.num_kv_heads;
  int num_y = 1;
  while (num_y * kHeads < heads_together && num_y * 2 * kLanes <= kAttentionThreads) num_y *= 2;
  p.heads_per_unit = kHeads == 1 && heads_together == 1 ? 1 : num_y * kHeads;
  p.units_per_kv_head = int(ceil_div(group_size, p.heads_per_unit));
  const size_t states = size_t(kAttentionThreads) * kHeads * (State::kChannels + 2) * sizeof(float);
  const size_t tiles = sizeof(AttentionTiles<T, kLanes, kChunks>);
  const dim3 grid(unsigned(p.batch * p.num_kv_heads * p.units_per_kv_head), unsigned(p.splits));
  CLUSTERKV_LAUNCH((clusterkv_attention_split<T, kLanes, kChunks, kHeads>), grid,
                   dim3(kAttentionThreads), tiles > states ? tiles : states, stream, p);
}

template <class T, int kLanes, int kChunks>
void launch_attention_heads(const AttentionProblem<T>& p, int heads_together, cudaStream_t stream) {
  if (heads_together == 1) {
    launch_attention_split<T, kLanes, kChunks, 1>(p, heads_together, stream);
  } else if (heads_together == 2) {
    launch_attention_split<T, kLanes, kChunks, 2>(p, heads_together, stream);
  } else {
    launch_attention_split<T, kLanes, kChunks, 4>(p, heads_together, stream);
  }
}

template <class T>
void launch_attention_merge(const AttentionProblem<T>& p, cudaStream_t stream) {
  CLUSTERKV_LAUNCH((clusterkv_attention_merge<T>), dim3(unsigned(p.batch * p.num_qo_heads)),
                   dim3(kAttentionThreads), 0, stream, p);
}

template <class T>
void launch_selected_attention(const AttentionProblem<T>& p, cudaStream_t stream) {
  if (p.batch * p.num_qo_heads == 0) return;
  const bool is_shared = p.num_selected == 0 || p.num_select_heads == p.num_kv_heads;
  const int heads_together = is_shared ? p.num_qo_heads / p.num_kv_heads : 1;
  const int chunks = int(ceil_div(p.head_dim, Chunk<T>::kSize));
  if (chunks <= 8) {
    launch_attention_heads<T, 8, 1>(p, heads_together, stream);
  } else if (chunks <= 16) {
    launch_attention_heads<T, 16, 1>(p, heads_together, stream);
  } else if (chunks <= 32) {
    launch_attention_heads<T, 32, 1>(p, heads_together, stream);
  } else if constexpr (sizeof(T) == 4) {
    launch_attention_heads<T, 32, 2>(p, heads_together, stream);
  }
  launch_attention_merge(p, stream);
}

template <class T>
void launch_merge_states(const T* out_a, const float* lse_a, const T* out_b, const float* lse_b,
                         T* out, float* lse, int64_t rows, int head_dim, cudaStream_t stream) {
  if (rows * head_dim == 0) return;
  const unsigned blocks = unsigned(ceil_div(rows * head_dim, 256));
  CLUSTERKV_LAUNCH((clusterkv_merge_states<T>), dim3(blocks), dim3(256), 0, stream, out_a, lse_a,
                   out_b, lse_b, out, lse, rows, head_dim);
}

}  // namespace clusterkv
