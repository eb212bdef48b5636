// Prefill attention by mma.sync, bf16 activations, float8 e4m3 cache.
#include "cuda/attention/prefill_instances/prefill_instances.h"
#include "cuda/attention/prefill_mma_launch.cuh"

namespace pagedkv::cuda {

void launch_prefill_mma_bfloat16_e4m3(const PagedAttentionParams& params, cudaStream_t stream) {
  launch_prefill_mma_any_dim<__nv_bfloat16, __nv_fp8_e4m3>(params, stream);
}

}  // namespace pagedkv::cuda
