// The product of many rows, in tiles that are multiplied by wgmma.
#pragma once

#include <cuda_runtime.h>

#include "pagedkv/kernels/linear_params.h"

namespace pagedkv::cuda {

// Whether it takes this product, on this device.
bool can_tiled_linear(const StreamedLinearParams& params);

// REQUIRES can_tiled_linear(params).
void launch_tiled_linear(const StreamedLinearParams& params, cudaStream_t stream);

}  // namespace pagedkv::cuda
