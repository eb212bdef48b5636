// Decode attention, fp16 activations, float8 e4m3 cache.
#include "cuda/attention/decode_instances/decode_instances.h"
#include "cuda/attention/decode_launch.cuh"

namespace pagedkv::cuda {

void launch_decode_float16_e4m3(const PagedAttentionParams& params, cudaStream_t stream) {
  launch_decode_any_dim<__half, __nv_fp8_e4m3>(params, stream);
}

}  // namespace pagedkv::cuda
