// All small kernels for the instruction set that the including file has chosen, and their table.
// No include guard: each kernels_<isa>.cpp includes it once. See cpu/simd/vec.h for the rules.
#include "cpu/simd/vec.h"
// After vec.h, which chooses the target:
#include "cpu/cache/gather_blocks_body.h"
#include "cpu/cache/reshape_and_cache_body.h"
#include "cpu/layers/merge_attention_states_body.h"
#include "cpu/layers/rms_norm_body.h"
#include "cpu/layers/rotary_embedding_body.h"
#include "cpu/sampling/row_passes_body.h"
// Last, as they are made of others:
#include "cpu/cache/fused_rotary_reshape_and_cache_body.h"
#include "cpu/layers/activation_body.h"
#include "cpu/layers/scale_heads_body.h"
#include "cpu/layers/streamed_linear_body.h"

namespace pagedkv::cpu::PAGEDKV_ISA {

constexpr KernelTable kKernelTable{.reshape_and_cache = reshape_and_cache,
                                   .fused_rotary_reshape_and_cache = fused_rotary_reshape_and_cache,
                                   .gather_blocks = gather_blocks,
                                   .merge_attention_states = merge_attention_states,
                                   .rms_norm = rms_norm,
                                   .fused_add_rms_norm = fused_add_rms_norm,
                                   .rotary_embedding = rotary_embedding,
                                   .activation = activation,
                                   .scale_heads = scale_heads,
                                   .streamed_linear = streamed_linear,
                                   .widen_logits = widen_logits,
                                   .largest_logit = largest_logit,
                                   .logit_weights = logit_weights};

}  // namespace pagedkv::cpu::PAGEDKV_ISA
