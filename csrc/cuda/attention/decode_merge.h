// The second kernel of decode attention.
#pragma once

#include <cuda_runtime.h>

#include "pagedkv/kernels/attention_params.h"

namespace pagedkv::cuda {

// Nothing to do with num_splits 1. num_workers: blocks of the decode kernel's grid.
void launch_decode_merge(const PagedAttentionParams& params, int num_workers, cudaStream_t stream);

}  // namespace pagedkv::cuda
