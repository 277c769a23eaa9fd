// Compiles one kernel text for several instruction sets inside one translation unit.
//
// A file that has kernels does
//
//     #define CLUSTERKV_KERNEL_TEXT "attention_kernel.h"
//     #include "per_isa.h"
//
// and gets the namespaces clusterkv::base, ::avx2 and ::avx512, each with simd.h and the text in
// it; with CLUSTERKV_BF16_TEXT defined also ::avx512_bf16. Without a text this file only says
// whether there are several.
//
// Note [One text, several instruction sets]
// The text is included under `#pragma GCC target`, so no build flag is needed, and no standard
// inline function is compiled with instructions that the machine may lack: every other header is
// included before. Against target_clones: the level can be forced by CLUSTERKV_CPU_ISA, so that
// the lower levels are testable on a newer machine. Other compilers get the base level only.

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CLUSTERKV_MULTI_ISA 1
#include <immintrin.h>
#else
#define CLUSTERKV_MULTI_ISA 0
#endif

#ifdef CLUSTERKV_KERNEL_TEXT

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define CLUSTERKV_INLINE static inline __attribute__((always_inline))

#define CLUSTERKV_ISA 0
namespace clusterkv::base {
#include "simd.h"
#include CLUSTERKV_KERNEL_TEXT
}  // namespace clusterkv::base
#undef CLUSTERKV_ISA

#if CLUSTERKV_MULTI_ISA

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2")
#define CLUSTERKV_ISA 1
namespace clusterkv::avx2 {
#include "simd.h"
#include CLUSTERKV_KERNEL_TEXT
}  // namespace clusterkv::avx2
#undef CLUSTERKV_ISA
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,bmi2")
#define CLUSTERKV_ISA 2
namespace clusterkv::avx512 {
#include "simd.h"
#include CLUSTERKV_KERNEL_TEXT
}  // namespace clusterkv::avx512
#undef CLUSTERKV_ISA
#pragma GCC pop_options

#ifdef CLUSTERKV_BF16_TEXT
#pragma GCC push_options
#pragma GCC target("avx512bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,bmi2")
#define CLUSTERKV_ISA 3
namespace clusterkv::avx512_bf16 {
#include "simd.h"
#include CLUSTERKV_KERNEL_TEXT
}  // namespace clusterkv::avx512_bf16
#undef CLUSTERKV_ISA
#pragma GCC pop_options
#define CLUSTERKV_PICK_AVX512(NAME) \
  (active_isa() == Isa::kAvx512Bf16 ? avx512_bf16::NAME : avx512::NAME)
#else
#define CLUSTERKV_PICK_AVX512(NAME) (avx512::NAME)
#endif  // CLUSTERKV_BF16_TEXT

#include "isa.h"

// The table of kernels, `NAME` of the namespace that the process runs on.
#define CLUSTERKV_PICK(NAME)                                  \
  (active_isa() >= Isa::kAvx512 ? CLUSTERKV_PICK_AVX512(NAME) \
   : active_isa() == Isa::kAvx2 ? avx2::NAME                  \
                                : base::NAME)

#else
#include "isa.h"
#define CLUSTERKV_PICK(NAME) (base::NAME)
#endif  // CLUSTERKV_MULTI_ISA

#undef CLUSTERKV_KERNEL_TEXT
#endif  // CLUSTERKV_KERNEL_TEXT
