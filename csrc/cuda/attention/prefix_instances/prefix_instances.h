// The instantiations of the kernels over shared prefixes: by mma.sync, one file for each activation
// type and cache type, five padded head sizes in each, 30 kernels; and by wgmma, 4 kernels.
#pragma once

#include <cuda_runtime.h>

#include "pagedkv/kernels/attention_params.h"

namespace pagedkv::cuda {

void launch_prefix_bfloat16(const PagedAttentionParams& params, cudaStream_t stream);
void launch_prefix_bfloat16_e4m3(const PagedAttentionParams& params, cudaStream_t stream);
void launch_prefix_bfloat16_e5m2(const PagedAttentionParams& params, cudaStream_t stream);
void launch_prefix_float16(const PagedAttentionParams& params, cudaStream_t stream);
void launch_prefix_float16_e4m3(const PagedAttentionParams& params, cudaStream_t stream);
void launch_prefix_float16_e5m2(const PagedAttentionParams& params, cudaStream_t stream);

// Over the prefixes only, in place of the mma.sync kernel where has_prefill_wgmma(params).
void launch_prefix_wgmma(const PagedAttentionParams& params, cudaStream_t stream);

}  // namespace pagedkv::cuda
