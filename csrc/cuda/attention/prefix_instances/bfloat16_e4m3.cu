// Attention of sequences that share a prefix, bf16 activations, float8 e4m3 cache.
#include "cuda/attention/prefix_instances/prefix_instances.h"
#include "cuda/attention/prefix_launch.cuh"

namespace pagedkv::cuda {

void launch_prefix_bfloat16_e4m3(const PagedAttentionParams& params, cudaStream_t stream) {
  launch_prefix_any_dim<__nv_bfloat16, __nv_fp8_e4m3>(params, stream);
}

}  // namespace pagedkv::cuda
