#include "isa.h"

#include <torch/csrc/stable/library.h>

#include <cstdlib>
#include <string>

#include "per_isa.h"

namespace clusterkv {
namespace {

constexpr const char* kNames[] = {"base", "avx2", "avx512", "avx512_bf16"};

Isa best_supported() {
#if CLUSTERKV_MULTI_ISA
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512 && __builtin_cpu_supports("avx512bf16")) return Isa::kAvx512Bf16;
  if (has_avx512) return Isa::kAvx512;
  if (has_avx2) return Isa::kAvx2;
#endif
  return Isa::kBase;
}

Isa choose() {
  const Isa best = best_supported();
  const char* wish = std::getenv("CLUSTERKV_CPU_ISA");
  for (int level = 0; wish != nullptr && level < static_cast<int>(best); ++level) {
    if (std::string(wish) == kNames[level]) return static_cast<Isa>(level);
  }
  return best;
}

std::string cpu_isa() { return isa_name(active_isa()); }

}  // namespace

Isa active_isa() {
  static const Isa isa = choose();
  return isa;
}

const char* isa_name(Isa isa) { return kNames[static_cast<int>(isa)]; }

}  // namespace clusterkv

// It has no tensor argument that could name a device.
STABLE_TORCH_LIBRARY_IMPL(clusterkv, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&clusterkv::cpu_isa));
}
