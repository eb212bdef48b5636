// Which instruction set the CPU kernels use: the best that this processor has, or what the
// environment variable PAGEDKV_CPU_ISA = scalar | avx2 | avx512 | avx512_bf16 names (for tests;
// read once).
#pragma once

#include <string>
#include <vector>

namespace pagedkv::cpu {

// kAvx512Bf16 is kAvx512 with the bf16 dot product: attention uses it, the small kernels need not.
enum class Isa { kScalar, kAvx2, kAvx512, kAvx512Bf16 };

// Those this binary holds and this processor runs, plainest first.
std::vector<Isa> available_isas();

// The choice for this process. Throws std::runtime_error, naming what is allowed, when
// PAGEDKV_CPU_ISA names something else or something that this processor lacks.
Isa active_isa();

const char* isa_name(Isa isa);

}  // namespace pagedkv::cpu
