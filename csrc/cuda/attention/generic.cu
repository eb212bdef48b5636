// Paged attention for whatever the tensor-core kernels do not take: fp32, head sizes and block
// sizes that are no multiple of 8, strides that are not aligned. Plain fp32 arithmetic, every block
// size.
//
// Grid: one block a (query token, query head); its warps take every fourth group of keys and merge
// at the end, in order. Reads K and V once per query head: right, not fast.
// Instantiations: 3 activation types x 3 cache types = 9.
#include "cuda/attention/launch.h"
#include "cuda/attention/sequence.cuh"
#include "cuda/device/launch.h"
#include "cuda/device/numeric.cuh"

namespace pagedkv::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kKeys = 4;                     // of a warp's step: as many independent dot products
constexpr int kLaneDims = kMaxHeadDim / 32;  // head_dim elements of a lane: lane + 32 i

struct RowState {
  float highest = -INFINITY;  // of the logits, base 2
  float sum = 0.0f;
  float out[kLaneDims] = {};
};

template <class T, class C>
__device__ void attend(const PagedAttentionParams& params, const float (&query)[kLaneDims],
                       const int32_t* table, KeyRange keys, int position, int64_t kv_head,
                       float slope, int warp, int lane, RowState& state) {
  const ConstKvCache& cache = params.cache;
  const int head_dim = static_cast<int>(cache.head_dim);
  const LogitScale scale = logit_scale(params, kv_head);
  for (int first = keys.first + warp * kKeys; first < keys.end; first += kWarps * kKeys) {
    float dots[kKeys];
    const C* values[kKeys];
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const int key = min(first + i, keys.end - 1);
      const int64_t block = table[key / cache.block_size];
      const int64_t offset = key % cache.block_size;
      const C* k = static_cast<const C*>(cache.key) + block * cache.key_stride_block +
                   kv_head * cache.key_stride_head + offset * cache.key_stride_token;
      values[i] = static_cast<const C*>(cache.value) + block * cache.value_stride_block +
                  kv_head * cache.value_stride_head + offset * cache.value_stride_token;
      dots[i] = 0.0f;
#pragma unroll
      for (int d = 0; d < kLaneDims; ++d) {
        if (lane + 32 * d < head_dim) dots[i] += query[d] * to_float(k[lane + 32 * d]);
      }
    }
    float highest = state.highest;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      dots[i] = scale.logit(warp_sum(dots[i])) + slope * static_cast<float>(first + i - position);
      if (first + i >= keys.end) dots[i] = -INFINITY;
      highest = fmaxf(highest, dots[i]);
    }
    const float shift = exp2f(state.highest - highest);  // 0 at first: highest is finite here
    state.highest = highest;
    state.sum *= shift;
#pragma unroll
    for (int d = 0; d < kLaneDims; ++d) state.out[d] *= shift;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      if (first + i >= keys.end) continue;
      const float weight = exp2f(dots[i] - highest);
      state.sum += weight;
#pragma unroll
      for (int d = 0; d < kLaneDims; ++d) {
        if (lane + 32 * d < head_dim) {
          state.out[d] += weight * to_float(values[i][lane + 32 * d]);
        }
      }
    }
  }
}

template <class T, class C>
__global__ void __launch_bounds__(kWarps * 32)
    generic_attention_kernel(const __grid_constant__ PagedAttentionParams params, int min_rows) {
  __shared__ float highests[kWarps];
  __shared__ float sums[kWarps];
  __shared__ float outs[kWarps][kMaxHeadDim];
  const int64_t token = blockIdx.x;
  const int64_t head = blockIdx.y;
  const int64_t seq = sequence_of_token(params, token);
  if (seq < 0) return;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int head_dim = static_cast<int>(params.cache.head_dim);
  const int64_t kv_head = head / (params.num_heads / params.cache.num_kv_heads);
  const Sequence sequence = load_sequence(params, seq);
  if (sequence.query_len * (params.num_heads / params.cache.num_kv_heads) <= min_rows) return;
  const int position = sequence.position(static_cast<int>(token) - sequence.query_start);
  const KeyRange keys = visible_keys(params, sequence.seq_len, position);

  float query[kLaneDims];
  const T* query_row = static_cast<const T*>(params.query) + token * params.query_stride_token +
                       head * params.query_stride_head;
#pragma unroll
  for (int d = 0; d < kLaneDims; ++d) {
    query[d] = lane + 32 * d < head_dim ? to_float(query_row[lane + 32 * d]) : 0.0f;
  }
  const float slope = params.alibi_slopes == nullptr
                          ? 0.0f
                          : params.alibi_slopes[head * params.alibi_slopes_stride] * kLog2E;
  RowState state;
  attend<T, C>(params, query, params.block_tables + seq * params.block_tables_stride, keys,
               position, kv_head, slope, warp, lane, state);
  if (lane == 0) {
    highests[warp] = state.highest;
    sums[warp] = state.sum;
  }
#pragma unroll
  for (int d = 0; d < kLaneDims; ++d) outs[warp][lane + 32 * d] = state.out[d];
  __syncthreads();

  float highest = -INFINITY;
  for (int w = 0; w < kWarps; ++w) highest = fmaxf(highest, highests[w]);
  float weights[kWarps];
  float sum = 0.0f;
  for (int w = 0; w < kWarps; ++w) {
    weights[w] = highests[w] == -INFINITY ? 0.0f : exp2f(highests[w] - highest);
    sum += weights[w] * sums[w];
  }
  const float factor = sum > 0.0f ? value_scale(params, kv_head) / sum : 0.0f;
  T* out =
      static_cast<T*>(params.out) + token * params.out_stride_token + head * params.out_stride_head;
  for (int d = static_cast<int>(threadIdx.x); d < head_dim; d += kWarps * 32) {
    float x = 0.0f;
    for (int w = 0; w < kWarps; ++w) x += weights[w] * outs[w][d];
    out[d] = from_float<T>(x * factor);
  }
  if (params.lse != nullptr && threadIdx.x == 0) {
    params.lse[token * params.lse_stride_token + head * params.lse_stride_head] =
        sum > 0.0f ? (highest + log2f(sum)) * kLn2 : -INFINITY;
  }
}

}  // namespace

void launch_generic_attention(const PagedAttentionParams& params, int min_rows,
                              cudaStream_t stream) {
  const dim3 grid(grid_size(params.num_tokens), static_cast<unsigned>(params.num_heads));
  with_activation_type(params.type, [&]<class T>(std::type_identity<T>) {
    with_cache_type<T>(params.cache.type, [&]<class C>(std::type_identity<C>) {
      generic_attention_kernel<T, C><<<grid, kWarps * 32, 0, stream>>>(params, min_rows);
    });
  });
  check_launch("paged_attention (generic)");
}

}  // namespace pagedkv::cuda
