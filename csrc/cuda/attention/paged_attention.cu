// paged_attention: which kernels a batch needs. Lengths are on the device and not read here, so the
// choice depends on sizes, types and alignment alone, and holds for every replay of a graph.
#include "cuda/attention/launch.h"
#include "cuda/attention/prefix_states.cuh"
#include "cuda/attention/sequence.cuh"
#include "cuda/device/launch.h"
#include "cuda/device/overlapped_launch.cuh"
#include "pagedkv/kernels/cuda_launchers.h"

namespace pagedkv::cuda {
namespace {

// Multiprocessors that decode gets beside prefill or shared prefixes. Half of them read nearly as
// fast as all; the other kernel starts on the others, and goes on on decode's as they become free,
// so the share need not follow how much there is of each. Measured:
// benchmarks/results/2026-11-29-mixed-steps.md, 2026-11-30-prefix2048-attempts.md.
int64_t decode_share() { return max(1, num_multiprocessors() / 2); }

}  // namespace

bool tensor_core_operands(const PagedAttentionParams& params) {
  if (params.type == ElementType::kFloat32) return false;
  const ConstKvCache& cache = params.cache;
  const int64_t stored = element_bytes(cache.type);
  constexpr int64_t kElement = 2;
  return cache.head_dim % (16 / stored) == 0 && cache.block_size % 8 == 0 &&
         aligned_to(16, {params.query, params.out, cache.key, cache.value},
                    {params.query_stride_token * kElement, params.query_stride_head * kElement,
                     params.out_stride_token * kElement, params.out_stride_head * kElement,
                     cache.key_stride_block * stored, cache.key_stride_head * stored,
                     cache.key_stride_token * stored, cache.value_stride_block * stored,
                     cache.value_stride_head * stored, cache.value_stride_token * stored});
}

int64_t paged_attention_num_workers(int device_index) {
  constexpr int64_t kMostBlocksPerMultiprocessor = 2;
  return kMostBlocksPerMultiprocessor *
         device_attribute(cudaDevAttrMultiProcessorCount, device_index);
}

void launch_paged_attention(const PagedAttentionParams& caller, StreamHandle handle) {
  const auto stream = static_cast<cudaStream_t>(handle);
  PagedAttentionParams params = caller;
  if (params.num_tokens == 0 || params.num_seqs == 0 || params.max_query_len == 0) return;
  if (!tensor_core_operands(params)) return launch_generic_attention(params, 0, stream);
  const bool shares = params.num_prefix_groups > 0;
  if (shares && params.lse == nullptr) {  // the prefix needs it
    params.lse = prefix_states(params).lse;
    params.lse_stride_token = params.num_heads;
    params.lse_stride_head = 1;
  }
  const int64_t group = params.num_heads / params.cache.num_kv_heads;
  const bool prefills = params.max_query_len * group > kMaxDecodeRows;
  // Prefill then starts beside decode, unless the kernels of shared prefixes stand between them.
  const bool beside = prefills && prepare_prefill(params, stream) && !shares;
  const bool mixed = beside && params.num_tokens < params.num_seqs * params.max_query_len;
  // Pieces of several splits are merged by a kernel between decode and the prefix.
  const bool prefix_beside =
      shares && params.num_splits <= 1 && kernels_wait_inside(current_device());
  PagedAttentionParams decode = params;
  if (mixed || prefix_beside) decode.decode_multiprocessors = decode_share();
  launch_decode_attention(decode, stream);
  if (shares) launch_prefix_attention(decode, stream);
  if (prefills) launch_prefill_attention(params, stream);
}

}  // namespace pagedkv::cuda
