// Decode attention, bf16 activations, float8 e5m2 cache.
#include "cuda/attention/decode_instances/decode_instances.h"
#include "cuda/attention/decode_launch.cuh"

namespace pagedkv::cuda {

void launch_decode_bfloat16_e5m2(const PagedAttentionParams& params, cudaStream_t stream) {
  launch_decode_any_dim<__nv_bfloat16, __nv_fp8_e5m2>(params, stream);
}

}  // namespace pagedkv::cuda
