// Prefill attention (sequences of more rows than the decode kernel takes): wgmma where there is
// one, else mma.sync by activation type and cache type.
#include <stdexcept>
#include <string>

#include "cuda/attention/launch.h"
#include "cuda/attention/prefill_instances/prefill_instances.h"

namespace pagedkv::cuda {

bool prepare_prefill(const PagedAttentionParams& params, cudaStream_t stream) {
  return has_prefill_wgmma(params) && prepare_prefill_wgmma(params, stream);
}

void launch_prefill_attention(const PagedAttentionParams& params, cudaStream_t stream) {
  if (has_prefill_wgmma(params)) return launch_prefill_wgmma(params, stream);
  const ElementType cache = params.cache.type;
  if (params.type == ElementType::kBFloat16) {
    if (cache == ElementType::kBFloat16) return launch_prefill_mma_bfloat16(params, stream);
    if (cache == ElementType::kFloat8E4M3) return launch_prefill_mma_bfloat16_e4m3(params, stream);
    if (cache == ElementType::kFloat8E5M2) return launch_prefill_mma_bfloat16_e5m2(params, stream);
  } else if (params.type == ElementType::kFloat16) {
    if (cache == ElementType::kFloat16) return launch_prefill_mma_float16(params, stream);
    if (cache == ElementType::kFloat8E4M3) return launch_prefill_mma_float16_e4m3(params, stream);
    if (cache == ElementType::kFloat8E5M2) return launch_prefill_mma_float16_e5m2(params, stream);
  }
  throw std::runtime_error(std::string("pagedkv: no prefill kernel for ") +
                           element_name(params.type) + " with a cache of " + element_name(cache));
}

}  // namespace pagedkv::cuda
