// Attention of sequences that share a prefix, fp16 activations and cache.
#include "cuda/attention/prefix_instances/prefix_instances.h"
#include "cuda/attention/prefix_launch.cuh"

namespace pagedkv::cuda {

void launch_prefix_float16(const PagedAttentionParams& params, cudaStream_t stream) {
  launch_prefix_any_dim<__half, __half>(params, stream);
}

}  // namespace pagedkv::cuda
