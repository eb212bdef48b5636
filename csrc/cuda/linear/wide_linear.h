// The product of 129 to 256 rows, with the gate behind it.
#pragma once

#include <cuda_runtime.h>

#include "pagedkv/kernels/linear_params.h"

namespace pagedkv::cuda {

// Whether it takes this product, on this device.
bool can_wide_linear(const StreamedLinearParams& params);

// REQUIRES can_wide_linear(params).
void launch_wide_linear(const StreamedLinearParams& params, cudaStream_t stream);

}  // namespace pagedkv::cuda
