// The small kernels for AVX512. The bodies are the same for every instruction set.
#include "cpu/element_dispatch.h"
#include "cpu/kernel_table.h"
#include "cpu/simd/target.h"

#if PAGEDKV_HAS_X86_KERNELS
#define PAGEDKV_SIMD_AVX512
#include "cpu/kernels_body.h"
#endif
