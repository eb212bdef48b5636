// The instantiations of decode attention, one file for each activation type and cache type, five
// padded head sizes and two numbers of rows of a tile in each: 60 kernels, and 12 of small batches.
#pragma once

#include <cuda_runtime.h>

#include "pagedkv/kernels/attention_params.h"

namespace pagedkv::cuda {

void launch_decode_bfloat16(const PagedAttentionParams& params, cudaStream_t stream);
void launch_decode_bfloat16_e4m3(const PagedAttentionParams& params, cudaStream_t stream);
void launch_decode_bfloat16_e5m2(const PagedAttentionParams& params, cudaStream_t stream);
void launch_decode_float16(const PagedAttentionParams& params, cudaStream_t stream);
void launch_decode_float16_e4m3(const PagedAttentionParams& params, cudaStream_t stream);
void launch_decode_float16_e5m2(const PagedAttentionParams& params, cudaStream_t stream);

}  // namespace pagedkv::cuda
