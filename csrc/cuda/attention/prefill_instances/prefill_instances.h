// The instantiations of mma.sync prefill attention, one file for each activation type and cache
// type, five padded head sizes in each: 30 kernels; and of wgmma prefill attention, 4 kernels.
#pragma once

#include <cuda_runtime.h>

#include "pagedkv/kernels/attention_params.h"

namespace pagedkv::cuda {

void launch_prefill_mma_bfloat16(const PagedAttentionParams& params, cudaStream_t stream);
void launch_prefill_mma_bfloat16_e4m3(const PagedAttentionParams& params, cudaStream_t stream);
void launch_prefill_mma_bfloat16_e5m2(const PagedAttentionParams& params, cudaStream_t stream);
void launch_prefill_mma_float16(const PagedAttentionParams& params, cudaStream_t stream);
void launch_prefill_mma_float16_e4m3(const PagedAttentionParams& params, cudaStream_t stream);
void launch_prefill_mma_float16_e5m2(const PagedAttentionParams& params, cudaStream_t stream);

// Hopper, 16-bit caches, head_dim <= 128. Prepared before decode: true if it may start beside it.
bool has_prefill_wgmma(const PagedAttentionParams& params);
bool prepare_prefill_wgmma(const PagedAttentionParams& params, cudaStream_t stream);
void launch_prefill_wgmma(const PagedAttentionParams& params, cudaStream_t stream);

}  // namespace pagedkv::cuda
