// The kernels of one instruction set. Each kernels_<isa>.cpp fills one such table from the same
// bodies; launchers.cpp picks the table of active_isa(). Attention has its own
// (csrc/cpu/attention).
#pragma once

#include "pagedkv/kernels/attention_params.h"
#include "pagedkv/kernels/cache_params.h"
#include "pagedkv/kernels/layer_params.h"
#include "pagedkv/kernels/linear_params.h"
#include "pagedkv/kernels/sampling_params.h"
#include "pagedkv/kernels/thread_pool.h"

namespace pagedkv::cpu {

struct KernelTable {
  void (*reshape_and_cache)(const ReshapeAndCacheParams&, const ThreadPool&);
  void (*fused_rotary_reshape_and_cache)(const FusedRotaryReshapeAndCacheParams&,
                                         const ThreadPool&);
  void (*gather_blocks)(const GatherBlocksParams&, const ThreadPool&);
  void (*merge_attention_states)(const MergeAttentionStatesParams&, const ThreadPool&);
  void (*rms_norm)(const RmsNormParams&, const ThreadPool&);
  void (*fused_add_rms_norm)(const FusedAddRmsNormParams&, const ThreadPool&);
  void (*rotary_embedding)(const RotaryEmbeddingParams&, const ThreadPool&);
  void (*activation)(const ActivationParams&, const ThreadPool&);
  void (*scale_heads)(const ScaleHeadsParams&, const ThreadPool&);
  void (*streamed_linear)(const StreamedLinearParams&, const ThreadPool&);
  // Passes over one row of logits; see sampling/row_passes_body.h.
  void (*widen_logits)(float* out, const void* logits, ElementType type, int64_t n);
  float (*largest_logit)(const float* x, int64_t n);
  void (*logit_weights)(float* x, int64_t n, float largest, float scale);
};

// sample_tokens and score_tokens, made of one table's passes (sampling/).
void sample_rows(const SampleTokensParams& params, const KernelTable& passes,
                 const ThreadPool& pool);
void score_rows(const ScoreTokensParams& params, const KernelTable& passes, const ThreadPool& pool);

namespace scalar {
extern const KernelTable kKernelTable;
}
namespace avx2 {
extern const KernelTable kKernelTable;
}
namespace avx512 {
extern const KernelTable kKernelTable;
}

// Elements that a thread should have before another one is worth waking.
inline constexpr int64_t kGrainElements = 16384;

inline constexpr int64_t grain_rows(int64_t row_elements) {
  return row_elements >= kGrainElements ? 1
                                        : kGrainElements / (row_elements < 1 ? 1 : row_elements);
}

}  // namespace pagedkv::cpu
