// Prefill attention by mma.sync, fp16 activations and cache.
#include "cuda/attention/prefill_instances/prefill_instances.h"
#include "cuda/attention/prefill_mma_launch.cuh"

namespace pagedkv::cuda {

void launch_prefill_mma_float16(const PagedAttentionParams& params, cudaStream_t stream) {
  launch_prefill_mma_any_dim<__half, __half>(params, stream);
}

}  // namespace pagedkv::cuda
