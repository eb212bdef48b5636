// The product of 5 to 128 rows, whose blocks work in clusters.
#pragma once

#include <cuda_runtime.h>

#include "pagedkv/kernels/linear_params.h"

namespace pagedkv::cuda {

// Whether it takes this product, on this device.
bool can_cluster_linear(const StreamedLinearParams& params);

// REQUIRES can_cluster_linear(params).
void launch_cluster_linear(const StreamedLinearParams& params, cudaStream_t stream);

}  // namespace pagedkv::cuda
