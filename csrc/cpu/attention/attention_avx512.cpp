// Paged attention for AVX512. The bodies are the same for every instruction set.
#include "cpu/attention/task.h"
#include "cpu/element_dispatch.h"
#include "cpu/simd/target.h"

#if PAGEDKV_HAS_X86_KERNELS
#define PAGEDKV_SIMD_AVX512
#include "cpu/attention/attention_body.h"
#endif
