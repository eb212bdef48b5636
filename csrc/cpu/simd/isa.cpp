// The choice of instruction set at run time. See isa.h.
#include "cpu/simd/isa.h"

#include <cstdlib>
#include <stdexcept>
#include <string_view>

#include "cpu/simd/target.h"

namespace pagedkv::cpu {

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kScalar:
      return "scalar";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx512Bf16:
      return "avx512_bf16";
  }
  throw std::invalid_argument("unknown Isa " + std::to_string(static_cast<int>(isa)));
}

std::vector<Isa> available_isas() {
  std::vector<Isa> found{Isa::kScalar};
#if PAGEDKV_HAS_X86_KERNELS
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  if (avx2) found.push_back(Isa::kAvx2);
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx2 && avx512) found.push_back(Isa::kAvx512);
  if (avx2 && avx512 && __builtin_cpu_supports("avx512bf16")) found.push_back(Isa::kAvx512Bf16);
#endif
  return found;
}

namespace {

Isa choose() {
  const std::vector<Isa> available = available_isas();
  const char* wanted = std::getenv("PAGEDKV_CPU_ISA");
  if (wanted == nullptr) return available.back();
  std::string allowed;
  for (const Isa isa : available) {
    if (std::string_view(wanted) == isa_name(isa)) return isa;
    allowed += (allowed.empty() ? "" : ", ") + std::string(isa_name(isa));
  }
  throw std::runtime_error("PAGEDKV_CPU_ISA is '" + std::string(wanted) +
                           "'; this processor and build have: " + allowed);
}

}  // namespace

Isa active_isa() {
  static const Isa isa = choose();
  return isa;
}

}  // namespace pagedkv::cpu
