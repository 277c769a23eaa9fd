// What the kernels of k-means share: the arguments of one call and its workspace.
//
// Convergence needs no host: iteration i of a (batch, head) raises changed[i, b, h] when a label
// changed; everything that follows looks there and returns at once when nothing did.
#pragma once

#include "device.cuh"

namespace clusterkv {

// The type that the tensor cores multiply, and in how many parts a key and a centroid are written
// as sums of it. Products of parts i, j with i + j < kCentroidParts are added, which keeps 16 bits
// of mantissa of a centroid for 16-bit keys and all 24 for float32.
template <class T>
struct Factors {
  using Element = T;
  static constexpr int kKeyParts = 1, kCentroidParts = 2;
};
template <>
struct Factors<float> {
  using Element = __nv_bfloat16;
  static constexpr int kKeyParts = 3, kCentroidParts = 3;
};

constexpr int kMaxSortTiles = 64;

template <class T>
struct ClusteringProblem {
  using Element = typename Factors<T>::Element;
  Rows<const T> keys;     // [B,Hkv,T,D]
  Rows<float> centroids;  // [B,Hkv,C,D]
  const int* initial;     // [B,C] or null: every cluster exists; -1: the row has no such cluster
  const int* valid;       // [B,2] or null: all tokens
  int* labels;            // [B,Hkv,T]
  // Workspace.
  Element* parts;  // [parts,B,Hkv,C,padded D]: directions of the centroids
  float* bias;     // [B,Hkv,C]: added to a cluster's score; -inf for one that doesn't exist
  int* counts;     // [B,Hkv,tiles,C]: tokens of a cluster in a stretch of tokens, then their places
  int* starts;     // [B,Hkv,C+1]: where a cluster's tokens start in `order`
  int* order;      // [B,Hkv,T]: tokens sorted by cluster, ascending inside it
  int* changed;    // [iterations,B,Hkv] or null: no loop
  int batch, heads, kv_len, num_clusters, head_dim;
  bool is_aligned;  // every key starts at 16 bytes and holds whole chunks

  __host__ __device__ int padded_dim() const { return int(round_up(head_dim, 16)); }
  __host__ __device__ int lists() const { return batch * heads; }

  // Tokens that one block of the sort handles, and how many blocks there are.
  __host__ __device__ int sort_tile() const {
    return max(256, int(round_up(ceil_div(kv_len, kMaxSortTiles), 32)));
  }
  __host__ __device__ int sort_tiles() const { return int(ceil_div(kv_len, sort_tile())); }

  // The range of tokens of a row, whatever `valid` holds.
  __device__ int begin(int row) const {
    return valid == nullptr ? 0 : min(max(valid[2 * row], 0), kv_len);
  }
  __device__ int end(int row) const {
    return valid == nullptr ? kv_len : min(max(valid[2 * row + 1], 0), kv_len);
  }

  // Whether a list (batch, head) still needs labels in this iteration, and an update after it.
  __device__ bool needs_labels(int iteration, int list) const {
    return changed == nullptr || iteration == 0 || changed[(iteration - 1) * lists() + list] != 0;
  }
  __device__ bool needs_update(int iteration, int list) const {
    return changed == nullptr || changed[iteration * lists() + list] != 0;
  }
};

}  // namespace clusterkv
