// Launchers of the CPU kernels (csrc/cpu). Each returns when the work is done, returns at once on
// empty work, is safe to call from several threads on disjoint outputs, and throws
// std::runtime_error for a combination it has no kernel for. Params come checked (csrc/ops).
#pragma once

#include "pagedkv/kernels/attention_params.h"
#include "pagedkv/kernels/cache_params.h"
#include "pagedkv/kernels/layer_params.h"
#include "pagedkv/kernels/linear_params.h"
#include "pagedkv/kernels/sampling_params.h"
#include "pagedkv/kernels/thread_pool.h"

namespace pagedkv::cpu {

void launch_reshape_and_cache(const ReshapeAndCacheParams& params, const ThreadPool& pool);
void launch_fused_rotary_reshape_and_cache(const FusedRotaryReshapeAndCacheParams& params,
                                           const ThreadPool& pool);
void launch_gather_blocks(const GatherBlocksParams& params, const ThreadPool& pool);
void launch_copy_blocks(const CopyBlocksParams& params, const ThreadPool& pool);
void launch_swap_blocks(const SwapBlocksParams& params, const ThreadPool& pool);

void launch_paged_attention(const PagedAttentionParams& params, const ThreadPool& pool);
void launch_merge_attention_states(const MergeAttentionStatesParams& params,
                                   const ThreadPool& pool);

void launch_rms_norm(const RmsNormParams& params, const ThreadPool& pool);
void launch_fused_add_rms_norm(const FusedAddRmsNormParams& params, const ThreadPool& pool);
void launch_rotary_embedding(const RotaryEmbeddingParams& params, const ThreadPool& pool);
void launch_activation(const ActivationParams& params, const ThreadPool& pool);
void launch_scale_heads(const ScaleHeadsParams& params, const ThreadPool& pool);
void launch_streamed_linear(const StreamedLinearParams& params, const ThreadPool& pool);

void launch_sample_tokens(const SampleTokensParams& params, const ThreadPool& pool);
void launch_score_tokens(const ScoreTokensParams& params, const ThreadPool& pool);

}  // namespace pagedkv::cpu
