// A value about which the compiler must assume nothing.
#pragma once

#include <cstdint>

namespace pagedkv::cuda {

// The same value, but one that the compiler keeps in a register: it would work addresses out again
// wherever they are used, or all of them before a loop, more than there are registers for.
__device__ inline uint32_t held(uint32_t value) {
  asm volatile("mov.b32 %0, %0;\n" : "+r"(value));
  return value;
}

}  // namespace pagedkv::cuda
