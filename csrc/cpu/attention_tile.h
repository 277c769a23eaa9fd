// What the host side of attention hands to its kernels. Free of torch headers.
#pragma once

#include <cstdint>

#include "../half.h"

namespace clusterkv {

constexpr int kTile = 32;         // tokens of a tile; a multiple of every vector width
constexpr int kStatePrefix = 16;  // floats before the accumulator: maximum, sum, padding

// Up to kTile tokens of one KV head. Places behind `count` repeat the last row.
template <class T>
struct Tile {
  const T* keys[kTile];
  const T* values[kTile];
  float bias[kTile];  // read if has_bias
  int count = 0;
  int kv_head = 0;
  bool has_bias = false;
};

// Floats of a packed query and of an accumulator: D padded to a multiple of 32.
inline int64_t padded_head_dim(int64_t head_dim) { return (head_dim + 31) / 32 * 32; }

// The kernels of one element type. A state is [maximum, sum, ..., accumulator in packed order].
template <class T>
struct AttentionKernels {
  // query [D] -> packed [padded D]
  void (*pack_query)(const T* query, int head_dim, float* packed);
  // Adds a tile to the states of `heads` query heads; `next` (may be null) is prefetched.
  // packed [heads, padded D]; state [heads], `state_stride` floats apart
  void (*attend)(const Tile<T>& tile, const Tile<T>* next, const float* packed, int heads,
                 int head_dim, float scale, float* state, int64_t state_stride);
  // Merges `parts` states in order: out [D], lse
  void (*finish)(const float* states, int parts, int64_t stride, int head_dim, T* out, float* lse);
};

}  // namespace clusterkv
