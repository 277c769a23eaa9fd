// The arguments of attention, and what one block of it works on: its query heads, and the list of
// their tokens.
#pragma once

#include <cmath>

#include "device.cuh"

namespace clusterkv {

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

}  // namespace clusterkv
