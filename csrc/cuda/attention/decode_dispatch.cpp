// Decode attention by activation type and cache type.
#include <stdexcept>
#include <string>

#include "cuda/attention/decode_instances/decode_instances.h"
#include "cuda/attention/launch.h"

namespace pagedkv::cuda {

void check_decode_workspace(const PagedAttentionParams& params, int64_t needed_bytes) {
  if (needed_bytes > params.workspace_bytes) {
    throw std::runtime_error("pagedkv: decode needs a workspace of " +
                             std::to_string(needed_bytes) + " bytes, got " +
                             std::to_string(params.workspace_bytes));
  }
}

void launch_decode_attention(const PagedAttentionParams& params, cudaStream_t stream) {
  const ElementType cache = params.cache.type;
  if (params.type == ElementType::kBFloat16) {
    if (cache == ElementType::kBFloat16) return launch_decode_bfloat16(params, stream);
    if (cache == ElementType::kFloat8E4M3) return launch_decode_bfloat16_e4m3(params, stream);
    if (cache == ElementType::kFloat8E5M2) return launch_decode_bfloat16_e5m2(params, stream);
  } else if (params.type == ElementType::kFloat16) {
    if (cache == ElementType::kFloat16) return launch_decode_float16(params, stream);
    if (cache == ElementType::kFloat8E4M3) return launch_decode_float16_e4m3(params, stream);
    if (cache == ElementType::kFloat8E5M2) return launch_decode_float16_e5m2(params, stream);
  }
  throw std::runtime_error(std::string("pagedkv: no decode kernel for ") +
                           element_name(params.type) + " with a cache of " + element_name(cache));
}

}  // namespace pagedkv::cuda
