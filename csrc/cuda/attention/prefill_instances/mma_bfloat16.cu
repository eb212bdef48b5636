// Prefill attention by mma.sync, bf16 activations and cache.
#include "cuda/attention/prefill_instances/prefill_instances.h"
#include "cuda/attention/prefill_mma_launch.cuh"

namespace pagedkv::cuda {

void launch_prefill_mma_bfloat16(const PagedAttentionParams& params, cudaStream_t stream) {
  launch_prefill_mma_any_dim<__nv_bfloat16, __nv_bfloat16>(params, stream);
}

}  // namespace pagedkv::cuda
