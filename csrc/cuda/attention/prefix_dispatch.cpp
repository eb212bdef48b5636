// Shared-prefix attention by activation type and cache type.
#include <stdexcept>
#include <string>

#include "cuda/attention/launch.h"
#include "cuda/attention/prefix_instances/prefix_instances.h"

namespace pagedkv::cuda {

void launch_prefix_attention(const PagedAttentionParams& params, cudaStream_t stream) {
  const ElementType cache = params.cache.type;
  if (params.type == ElementType::kBFloat16) {
    if (cache == ElementType::kBFloat16) return launch_prefix_bfloat16(params, stream);
    if (cache == ElementType::kFloat8E4M3) return launch_prefix_bfloat16_e4m3(params, stream);
    if (cache == ElementType::kFloat8E5M2) return launch_prefix_bfloat16_e5m2(params, stream);
  } else if (params.type == ElementType::kFloat16) {
    if (cache == ElementType::kFloat16) return launch_prefix_float16(params, stream);
    if (cache == ElementType::kFloat8E4M3) return launch_prefix_float16_e4m3(params, stream);
    if (cache == ElementType::kFloat8E5M2) return launch_prefix_float16_e5m2(params, stream);
  }
  throw std::runtime_error(std::string("pagedkv: no prefix kernel for ") +
                           element_name(params.type) + " with a cache of " + element_name(cache));
}

}  // namespace pagedkv::cuda
