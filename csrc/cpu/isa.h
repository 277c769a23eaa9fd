// Which instruction set the kernels of this process run on, chosen once.
#pragma once

namespace clusterkv {

// In ascending order: a forced level that the machine lacks becomes the best lower one.
enum class Isa { kBase = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3 };

// The best level the CPU supports, at most the one named by the environment variable
// CLUSTERKV_CPU_ISA (base, avx2, avx512, avx512_bf16). Reads the environment once.
Isa active_isa();

const char* isa_name(Isa isa);

}  // namespace clusterkv
