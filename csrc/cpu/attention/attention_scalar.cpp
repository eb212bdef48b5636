// Paged attention for SCALAR. The bodies are the same for every instruction set.
#include "cpu/attention/task.h"
#include "cpu/element_dispatch.h"

#define PAGEDKV_SIMD_SCALAR
#include "cpu/attention/attention_body.h"
