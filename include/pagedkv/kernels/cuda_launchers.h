// Launchers of the CUDA kernels (csrc/cuda). Each enqueues on the given stream of the current
// device, returns at once on empty work, and throws std::runtime_error for a CUDA error or a
// combination it has no kernel for. Params come checked (csrc/ops); device memory is never read on
// the host, so ids and lengths on the device are the caller's promise. No CUDA header is needed
// here: a stream is passed as the opaque pointer that cudaStream_t is.
#pragma once

#include "pagedkv/kernels/attention_params.h"
#include "pagedkv/kernels/cache_params.h"
#include "pagedkv/kernels/layer_params.h"
#include "pagedkv/kernels/linear_params.h"
#include "pagedkv/kernels/sampling_params.h"

namespace pagedkv::cuda {

using StreamHandle = void*;  // a cudaStream_t

void launch_reshape_and_cache(const ReshapeAndCacheParams& params, StreamHandle stream);
void launch_fused_rotary_reshape_and_cache(const FusedRotaryReshapeAndCacheParams& params,
                                           const BareProjection& bare, StreamHandle stream);
void launch_gather_blocks(const GatherBlocksParams& params, StreamHandle stream);
// The pairs are on the CPU and may be reused by the caller once the call has returned.
void launch_copy_blocks(const CopyBlocksParams& params, StreamHandle stream);
void launch_swap_blocks(const SwapBlocksParams& params, StreamHandle stream);

// Workers of the fixed grid on this device, for paged_attention_workspace_bytes.
int64_t paged_attention_num_workers(int device_index);
void launch_paged_attention(const PagedAttentionParams& params, StreamHandle stream);
void launch_merge_attention_states(const MergeAttentionStatesParams& params, StreamHandle stream);

void launch_rms_norm(const RmsNormParams& params, StreamHandle stream);
void launch_fused_add_rms_norm(const FusedAddRmsNormParams& params, StreamHandle stream);
void launch_rotary_embedding(const RotaryEmbeddingParams& params, StreamHandle stream);
void launch_activation(const ActivationParams& params, StreamHandle stream);
void launch_streamed_linear(const StreamedLinearParams& params, StreamHandle stream);

void launch_sample_tokens(const SampleTokensParams& params, StreamHandle stream);
void launch_score_tokens(const ScoreTokensParams& params, StreamHandle stream);

}  // namespace pagedkv::cuda
