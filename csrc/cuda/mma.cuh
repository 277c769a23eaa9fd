// One tensor-core step: D[16,8] += A[16,16] B[16,8], 16-bit factors, float32 sums, one warp.
//
// Who holds what (PTX ISA, mma.m16n8k16), with g = lane / 4 and t = lane % 4; two neighbouring
// elements share a register:
//
//   A  rows g, g + 8          columns 2t, 2t + 1 and 2t + 8, 2t + 9
//   B  rows 2t, 2t + 1 and 2t + 8, 2t + 9    column g
//   D  rows g, g + 8          columns 2t, 2t + 1
#pragma once

#include "device.cuh"

namespace clusterkv {

struct FragmentA {
  unsigned pairs[4];  // (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8)
};

struct FragmentB {
  unsigned pairs[2];  // (2t, g), (2t + 8, g)
};

template <class E>
__device__ __forceinline__ unsigned pack(E low, E high) {
  struct Pair {
    E low, high;
  };
  union {
    Pair pair;
    unsigned bits;
  } both{Pair{low, high}};
  return both.bits;
}

// The pair at an even channel of 16-bit elements in shared memory: one 32-bit load.
template <class E>
__device__ __forceinline__ unsigned load_pair(const E* at) {
#ifdef CLUSTERKV_EMULATED
  return pack(at[0], at[1]);
#else
  return *reinterpret_cast<const unsigned*>(at);
#endif
}

#ifdef CLUSTERKV_EMULATED
template <class E>
void multiply_add(float (&sums)[4], const FragmentA& a, const FragmentB& b) {
  const emulator::Exchange of_a = emulator::all_lanes(EMULATOR_PLACE, a);
  const emulator::Exchange of_b = emulator::all_lanes(EMULATOR_PLACE, b);
  const int g = emulator::current->lane / 4, t = emulator::current->lane % 4;
  const auto element = [](unsigned pair, int k) {
    E halves[2];
    memcpy(static_cast<void*>(halves), &pair, sizeof pair);
    return to_float(halves[k % 2]);
  };
  for (int i = 0; i < 4; ++i) {
    const int row = g + (i < 2 ? 0 : 8), column = 2 * t + i % 2;
    for (int k = 0; k < 16; ++k) {
      const FragmentA left = of_a.of<FragmentA>(unsigned(row % 8 * 4 + k % 8 / 2));
      const FragmentB right = of_b.of<FragmentB>(unsigned(column * 4 + k % 8 / 2));
      sums[i] += element(left.pairs[row / 8 + k / 8 * 2], k) * element(right.pairs[k / 8], k);
    }
  }
}
#else
template <class E>
__device__ __forceinline__ void multiply_add(float (&sums)[4], const FragmentA& a,
                                             const FragmentB& b);

#define CLUSTERKV_MULTIPLY_ADD(E, type)                                                 \
  template <>                                                                           \
  __device__ __forceinline__ void multiply_add<E>(float (&sums)[4], const FragmentA& a, \
                                                  const FragmentB& b) {                 \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                 \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])           \
                 : "r"(a.pairs[0]), "r"(a.pairs[1]), "r"(a.pairs[2]), "r"(a.pairs[3]),  \
                   "r"(b.pairs[0]), "r"(b.pairs[1]));                                   \
  }
CLUSTERKV_MULTIPLY_ADD(__nv_bfloat16, "bf16")
CLUSTERKV_MULTIPLY_ADD(__half, "f16")
#undef CLUSTERKV_MULTIPLY_ADD
#endif

}  // namespace clusterkv
