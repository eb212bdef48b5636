// The small kernels in plain C++, for every processor. The bodies are the same for every
// instruction set.
#include "cpu/element_dispatch.h"
#include "cpu/kernel_table.h"
#include "cpu/simd/target.h"

#define PAGEDKV_SIMD_SCALAR
#include "cpu/kernels_body.h"
