// The launchers that paged_attention is made of; attention/paged_attention.cu chooses among them.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "pagedkv/kernels/attention_params.h"

namespace pagedkv::cuda {

// Every type, size, stride and alignment; slow. Only sequences of more than min_rows packed rows.
void launch_generic_attention(const PagedAttentionParams& params, int min_rows,
                              cudaStream_t stream);

// Whether the tensor-core kernels can address these operands: 16-bit activations, head_dim a
// multiple of what 16 bytes of the cache hold, block_size a multiple of 8, aligned pointers and
// strides.
bool tensor_core_operands(const PagedAttentionParams& params);

// launch(std::integral_constant<int, d>), d being the head_dim that kernels have, 64 to 256, which
// head_dim is padded to.
template <class Launch>
void with_padded_head_dim(int64_t head_dim, const Launch& launch) {
  if (head_dim <= 64) return launch(std::integral_constant<int, 64>());
  if (head_dim <= 96) return launch(std::integral_constant<int, 96>());
  if (head_dim <= 128) return launch(std::integral_constant<int, 128>());
  if (head_dim <= 192) return launch(std::integral_constant<int, 192>());
  return launch(std::integral_constant<int, 256>());
}

// Sequences of at most kMaxDecodeRows packed rows. Writes their rows of out and lse.
void launch_decode_attention(const PagedAttentionParams& params, cudaStream_t stream);

// Throws if decode needs more of the caller's workspace than there is.
void check_decode_workspace(const PagedAttentionParams& params, int64_t needed_bytes);

// The prefixes that sequences share (prefix_groups.cuh), behind launch_decode_attention, which has
// attended to their other keys: adds them to these rows of out and lse, which is not null.
void launch_prefix_attention(const PagedAttentionParams& params, cudaStream_t stream);

// The other sequences. prepare_prefill comes first, before decode: then prefill may start beside
// decode, and it says whether it will.
bool prepare_prefill(const PagedAttentionParams& params, cudaStream_t stream);
void launch_prefill_attention(const PagedAttentionParams& params, cudaStream_t stream);

}  // namespace pagedkv::cuda
