// Decode attention, bf16 activations and cache.
#include "cuda/attention/decode_instances/decode_instances.h"
#include "cuda/attention/decode_launch.cuh"

namespace pagedkv::cuda {

void launch_decode_bfloat16(const PagedAttentionParams& params, cudaStream_t stream) {
  launch_decode_any_dim<__nv_bfloat16, __nv_bfloat16>(params, stream);
}

}  // namespace pagedkv::cuda
