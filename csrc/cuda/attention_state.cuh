// The parts of an attention block: tiles of K and V in shared memory, and the softmax states that
// its threads keep in registers (decomposition: attention.cuh).
#pragma once

#include "attention_problem.cuh"

namespace clusterkv {

constexpr int kAttentionThreads = 128;
constexpr int kTokensPerStep = 4;

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

}  // namespace clusterkv
