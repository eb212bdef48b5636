// The second kernel of decode attention, for num_splits n > 1.
#pragma once

#include <cuda_runtime.h>

#include "pagedkv/kernels/attention_params.h"

namespace pagedkv::cuda {

// Nothing to do with num_splits 0 and 1.
void launch_decode_merge(const PagedAttentionParams& params, cudaStream_t stream);

}  // namespace pagedkv::cuda
