// Launchers of the small kernels: return on empty work, pick the instruction set, run. The copies
// of whole blocks (cache/block_copies.cpp) and paged attention (attention/) have their own.
#include <stdexcept>
#include <string>

#include "cpu/kernel_table.h"
#include "cpu/simd/isa.h"
#include "cpu/simd/target.h"
#include "pagedkv/kernels/cpu_launchers.h"

namespace pagedkv::cpu {
namespace {

const KernelTable& kernels() {
  switch (active_isa()) {
    case Isa::kScalar:
      return scalar::kKernelTable;
#if PAGEDKV_HAS_X86_KERNELS
    case Isa::kAvx2:
      return avx2::kKernelTable;
    case Isa::kAvx512:
    case Isa::kAvx512Bf16:
      return avx512::kKernelTable;
#endif
    default:
      throw std::runtime_error(std::string("no CPU kernels for ") + isa_name(active_isa()));
  }
}

}  // namespace

void launch_reshape_and_cache(const ReshapeAndCacheParams& params, const ThreadPool& pool) {
  if (params.num_tokens > 0) kernels().reshape_and_cache(params, pool);
}
void launch_fused_rotary_reshape_and_cache(const FusedRotaryReshapeAndCacheParams& params,
                                           const ThreadPool& pool) {
  if (params.write.num_tokens > 0) kernels().fused_rotary_reshape_and_cache(params, pool);
}
void launch_gather_blocks(const GatherBlocksParams& params, const ThreadPool& pool) {
  if (params.num_tokens > 0 && params.num_seqs > 0) kernels().gather_blocks(params, pool);
}
void launch_merge_attention_states(const MergeAttentionStatesParams& params,
                                   const ThreadPool& pool) {
  if (params.num_tokens > 0) kernels().merge_attention_states(params, pool);
}
void launch_rms_norm(const RmsNormParams& params, const ThreadPool& pool) {
  if (params.num_tokens > 0) kernels().rms_norm(params, pool);
}
void launch_fused_add_rms_norm(const FusedAddRmsNormParams& params, const ThreadPool& pool) {
  if (params.num_tokens > 0) kernels().fused_add_rms_norm(params, pool);
}
void launch_rotary_embedding(const RotaryEmbeddingParams& params, const ThreadPool& pool) {
  if (params.num_tokens > 0) kernels().rotary_embedding(params, pool);
}
void launch_activation(const ActivationParams& params, const ThreadPool& pool) {
  if (params.num_tokens > 0 && params.intermediate_size > 0) kernels().activation(params, pool);
}
void launch_scale_heads(const ScaleHeadsParams& params, const ThreadPool& pool) {
  if (params.num_tokens > 0 && params.num_heads > 0) kernels().scale_heads(params, pool);
}
void launch_sample_tokens(const SampleTokensParams& params, const ThreadPool& pool) {
  if (params.rows.num_rows > 0) sample_rows(params, kernels(), pool);
}
void launch_score_tokens(const ScoreTokensParams& params, const ThreadPool& pool) {
  if (params.rows.num_rows > 0) score_rows(params, kernels(), pool);
}
void launch_streamed_linear(const StreamedLinearParams& params, const ThreadPool& pool) {
  if (params.num_tokens > 0 && params.out_features > 0) kernels().streamed_linear(params, pool);
}

}  // namespace pagedkv::cpu
