// Prefill attention by mma.sync, fp16 activations, float8 e5m2 cache.
#include "cuda/attention/prefill_instances/prefill_instances.h"
#include "cuda/attention/prefill_mma_launch.cuh"

namespace pagedkv::cuda {

void launch_prefill_mma_float16_e5m2(const PagedAttentionParams& params, cudaStream_t stream) {
  launch_prefill_mma_any_dim<__half, __nv_fp8_e5m2>(params, stream);
}

}  // namespace pagedkv::cuda
