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

#include <cmath>

#include "device.cuh"

namespace clusterkv {

constexpr int kAttentionThreads = 128;
constexpr int kTokensPerStep = 4;
constexpr int kMaxSplits = 64;
constexpr int kMinTokensPerSplit = 64;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

enum class MaskKind { kNone, kBool, kFloat, kHalf, kBFloat16 };

struct Mask {
  const void* data;
  int64_t batch_stride, head_stride, token_stride;  // head_stride 0: shared by all heads
  MaskKind kind;

  // What the mask adds to a logit.
  __device__ float at(int batch, int head, int token) const {
    const int64_t i = batch * batch_stride + head * head_stride + token * token_stride;
    switch (kind) {
      case MaskKind::kBool:
        return static_cast<const bool*>(data)[i] ? 0.f : -INFINITY;
      case MaskKind::kFloat:
        return static_cast<const float*>(data)[i];
      case MaskKind::kHalf:
        return to_float(static_cast<const __half*>(data)[i]);
      case MaskKind::kBFloat16:
        return to_float(static_cast<const __nv_bfloat16*>(data)[i]);
      default:
        return 0.f;
    }
  }
};

template <class T>
struct AttentionProblem {
  Rows<const T> query;                   // [B,Hq,1,D]
  Rows<const T> keys, values;            // [B,Hkv,T,D]
  Rows<const T> slot_keys, slot_values;  // [B,Hkv,N,D]
  const int* indices;                    // [B,Hs,S], -1: no token
  const int* slots;                      // [B,Hs,S] or null: read the selection in place
  const int* spans;                      // [B,2,2]: (begin, end) of sinks and of recent tokens
  Mask mask;                             // [B,1 or Hq,1,T]
  float* partial_out;                    // [B,Hq,splits,D]
  float* partial_lse;                    // [B,Hq,splits], base 2
  T* out;                                // [B,Hq,1,D]
  float* lse;                            // [B,Hq,1], natural log
  int batch, num_qo_heads, num_kv_heads, num_select_heads;
  int kv_len, num_selected, num_slots, head_dim;
  int splits, heads_per_unit, units_per_kv_head;
  float scale;
  bool is_aligned;  // every row starts at 16 bytes and holds whole chunks
};

// A token's places: in the store, and in the slots (-1: read it from the store). token -1: none.
struct TokenPlace {
  int token, slot;
};

// What one block works on, the same in all its threads.
template <class T>
struct AttentionUnit {
  const AttentionProblem<T>& p;
  int batch, kv_head, first_head, num_heads, select_head;
  int begin[2], length[2], list_length;

  __device__ AttentionUnit(const AttentionProblem<T>& problem, int block) : p(problem) {
    const int units = p.num_kv_heads * p.units_per_kv_head;
    const int group_size = p.num_qo_heads / p.num_kv_heads;
    batch = block / units;
    kv_head = block % units / p.units_per_kv_head;
    const int first_in_group = block % p.units_per_kv_head * p.heads_per_unit;
    first_head = kv_head * group_size + first_in_group;
    num_heads = min(p.heads_per_unit, group_size - first_in_group);
    select_head = p.num_select_heads == p.num_kv_heads ? kv_head : first_head;
    for (int i = 0; i < 2; ++i) {
      const int* span = p.spans + (batch * 2 + i) * 2;
      begin[i] = min(max(span[0], 0), p.kv_len);
      length[i] = max(min(max(span[1], 0), p.kv_len) - begin[i], 0);
    }
    list_length = length[0] + length[1] + p.num_selected;
  }

  // The i-th token of the list.
  __device__ TokenPlace place(int i) const {
    if (i < length[0]) return {begin[0] + i, -1};
    i -= length[0];
    if (i < length[1]) return {begin[1] + i, -1};
    i -= length[1];
    const TokenPlace none{-1, -1};
    if (i >= p.num_selected) return none;
    const int64_t at = (int64_t(batch) * p.num_select_heads + select_head) * p.num_selected + i;
    const int token = p.indices[at];
    if (token < 0 || token >= p.kv_len) return none;
    if (p.slots == nullptr) return {token, -1};
    const int slot = p.slots[at];
    return slot >= 0 && slot < p.num_slots ? TokenPlace{token, slot} : none;
  }

  __device__ const T* key_row(TokenPlace at) const {
    return at.slot >= 0 ? p.slot_keys.at(batch, kv_head, at.slot)
                        : p.keys.at(batch, kv_head, at.token);
  }

  __device__ const T* value_row(TokenPlace at) const {
    return at.slot >= 0 ? p.slot_values.at(batch, kv_head, at.slot)
                        : p.values.at(batch, kv_head, at.token);
  }

  // `score` (base 2) under the mask; -inf where the head must not see the token.
  __device__ float masked(float score, int head, int token) const {
    if (token < 0) return -INFINITY;
    if (p.mask.kind == MaskKind::kNone) return score;
    const float bias = p.mask.at(batch, head, token);
    return bias == -INFINITY ? -INFINITY : score + bias * kLog2E;
  }
};

// One chunk of a row into shared memory: copied, or element by element, or zeros.
template <class T>
__device__ void load_chunk(Chunk<T>* target, const T* row, int channel, int head_dim,
                           bool is_aligned) {
  if (row != nullptr && is_aligned && channel < head_dim) {
    copy_async(target, row + channel);
    return;
  }
  for (int i = 0; i < Chunk<T>::kSize; ++i) {
    const bool is_inside = row != nullptr && channel + i < head_dim;
    target->values[i] = is_inside ? row[channel + i] : from_float<T>(0.f);
  }
}

// Two tiles of K and V, and the places of three tiles' tokens.
template <class T, int kLanes, int kChunks>
struct AttentionTiles {
  static constexpr int kTokens = kTokensPerStep * kAttentionThreads / kLanes;
  static constexpr int kRowChunks = kLanes * kChunks;
  struct Tile {
    Chunk<T> keys[kTokens][kRowChunks];
    Chunk<T> values[kTokens][kRowChunks];
  };
  Tile tiles[2];
  TokenPlace places[3][kTokens];

  __device__ void load(const AttentionUnit<T>& unit, int tile) {
    Tile& target = tiles[tile % 2];
    for (int i = threadIdx.x; i < kTokens * kRowChunks; i += kAttentionThreads) {
      const int token = i / kRowChunks, chunk = i % kRowChunks;
      const TokenPlace at = places[tile % 3][token];
      const T* key = at.token < 0 ? nullptr : unit.key_row(at);
      const T* value = at.token < 0 ? nullptr : unit.value_row(at);
      const int channel = chunk * Chunk<T>::kSize;
      load_chunk(&target.keys[token][chunk], key, channel, unit.p.head_dim, unit.p.is_aligned);
      load_chunk(&target.values[token][chunk], value, channel, unit.p.head_dim, unit.p.is_aligned);
    }
  }
};

// The softmax state of kHeads query heads in one thread: its channels of the sum, all of max, sum.
template <class T, int kLanes, int kChunks, int kHeads>
struct SoftmaxState {
  static constexpr int kChannels = kChunks * Chunk<T>::kSize;
  using Tiles = AttentionTiles<T, kLanes, kChunks>;
  float query[kHeads][kChannels];
  float out[kHeads][kChannels];
  float largest[kHeads], sum[kHeads];

  // Thread x holds channels of chunks x, x + kLanes, ...
  __device__ static int channel(int x, int i) {
    return (i / Chunk<T>::kSize * kLanes + x) * Chunk<T>::kSize + i % Chunk<T>::kSize;
  }

  __device__ void begin(const AttentionUnit<T>& unit, int x, int first) {
    for (int h = 0; h < kHeads; ++h) {
      largest[h] = -INFINITY;
      sum[h] = 0.f;
      const bool has_head = first + h < unit.num_heads;
      const int head = unit.first_head + (has_head ? first + h : 0);
      const T* row = unit.p.query.at(unit.batch, head, 0);
      for (int i = 0; i < kChannels; ++i) {
        const int c = channel(x, i);
        out[h][i] = 0.f;
        query[h][i] =
            has_head && c < unit.p.head_dim ? to_float(row[c]) * unit.p.scale * kLog2E : 0.f;
      }
    }
  }

  // The scores of one token, in every lane of its row.
  __device__ void score(const Chunk<T>* row, int x, float (&scores)[kHeads]) const {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) scores[h] = 0.f;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const Chunk<T> chunk = row[k * kLanes + x];
#pragma unroll
      for (int i = 0; i < Chunk<T>::kSize; ++i) {
        const float key = to_float(chunk.values[i]);
#pragma unroll
        for (int h = 0; h < kHeads; ++h) scores[h] += query[h][k * Chunk<T>::kSize + i] * key;
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) scores[h] = warp_sum<kLanes>(scores[h]);
  }

  // Takes the scores of a step into max and sum; turns them into weights.
  __device__ void rescale(float (&scores)[kTokensPerStep][kHeads]) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float next = largest[h];
#pragma unroll
      for (int j = 0; j < kTokensPerStep; ++j) next = fmaxf(next, scores[j][h]);
      const float base = next == -INFINITY ? 0.f : next;
      const float decay = exp2f(largest[h] - base);
      largest[h] = next;
      sum[h] *= decay;
#pragma unroll
      for (int j = 0; j < kTokensPerStep; ++j) {
        scores[j][h] = exp2f(scores[j][h] - base);
        sum[h] += scores[j][h];
      }
#pragma unroll
      for (int i = 0; i < kChannels; ++i) out[h][i] *= decay;
    }
  }

  // A token without weight adds nothing, whatever its value row holds.
  __device__ void accumulate(const Chunk<T>* row, int x, const float (&weights)[kHeads]) {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const Chunk<T> chunk = row[k * kLanes + x];
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        if (weights[h] == 0.f) continue;
#pragma unroll
        for (int i = 0; i < Chunk<T>::kSize; ++i) {
          out[h][k * Chunk<T>::kSize + i] += weights[h] * to_float(chunk.values[i]);
        }
      }
    }
  }

  // The tokens z, z + Z, ... of a tile, kTokensPerStep of them at a time.
  __device__ void attend(const AttentionUnit<T>& unit, const typename Tiles::Tile& tile,
                         const TokenPlace* places, int x, int first, int z, int num_z) {
    for (int token = z; token < Tiles::kTokens; token += kTokensPerStep * num_z) {
      float weights[kTokensPerStep][kHeads];
#pragma unroll
      for (int j = 0; j < kTokensPerStep; ++j) {
        score(tile.keys[token + j * num_z], x, weights[j]);
        const int position = places[token + j * num_z].token;
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          const int head = unit.first_head + min(first + h, unit.num_heads - 1);
          weights[j][h] = unit.masked(weights[j][h], head, position);
        }
      }
      rescale(weights);
#pragma unroll
      for (int j = 0; j < kTokensPerStep; ++j) {
        accumulate(tile.values[token + j * num_z], x, weights[j]);
      }
    }
  }
};

// Writes the block's softmax: the states of the Z threads of each head are added in order.
template <class State>
__device__ void store_partial(const State& state, float* shared, int lanes, int heads_per_thread,
                              int x, int y, int z, int num_y, int num_z, int num_heads,
                              int head_dim, int64_t first_row, int splits, float* partial_out,
                              float* partial_lse) {
  const int row = lanes * State::kChannels, rows = num_y * heads_per_thread;
  float* maxima = shared + num_z * rows * row;  // [Z][rows], then sums
  float* sums = maxima + num_z * rows;
  for (int h = 0; h < heads_per_thread; ++h) {
    const int at = z * rows + y * heads_per_thread + h;
    for (int i = 0; i < State::kChannels; ++i) {
      shared[at * row + State::channel(x, i)] = state.out[h][i];
    }
    if (x == 0) {
      maxima[at] = state.largest[h];
      sums[at] = state.sum[h];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < num_heads * head_dim; i += kAttentionThreads) {
    const int head = i / head_dim, channel = i % head_dim;
    float largest = -INFINITY, sum = 0.f, out = 0.f;
    for (int k = 0; k < num_z; ++k) largest = fmaxf(largest, maxima[k * rows + head]);
    const float base = largest == -INFINITY ? 0.f : largest;
    for (int k = 0; k < num_z; ++k) {
      const float weight = exp2f(maxima[k * rows + head] - base);
      sum += weight * sums[k * rows + head];
      out += weight * shared[(k * rows + head) * row + channel];
    }
    const int64_t to = (first_row + head) * splits + blockIdx.y;
    partial_out[to * head_dim + channel] = sum == 0.f ? 0.f : out / sum;
    if (channel == 0) partial_lse[to] = largest + log2f(sum);
  }
}

template <class T, int kLanes, int kChunks, int kHeads>
__global__ void __launch_bounds__(kAttentionThreads)
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
