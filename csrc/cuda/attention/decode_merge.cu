// Merges the pieces of num_splits n (partial_states.cuh) in the order of the keys, and writes rows
// of out and lse. Started while the decode kernel still runs, it waits for its end on the device.
//
// Grid: one warp a row. Reads T * H * n states of head_dim + 2 fp32. Instantiations: 2 types.
#include "cuda/attention/decode_merge.h"
#include "cuda/attention/partial_states.cuh"
#include "cuda/attention/prefix_groups.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/overlapped_launch.cuh"

namespace pagedkv::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kQuads = kMaxHeadDim / 128;  // of head_dim elements a lane: 4 * lane + 128 * i
constexpr int kAtOnce = 8;                 // states read together

// What a warp has of a row: its sums relative to `reference`.
struct RowSums {
  float reference = -INFINITY;
  float total = 0.0f;
  float4 sums[kQuads] = {};
};

// Parts [first, end) of one row by one warp, in order; number(i) is part i's state.
template <class Number>
__device__ RowSums sum_parts(const PieceStates& states, int head_dim, int first, int end, int lane,
                             const Number& number) {
  RowSums row;
  for (int i = first + lane; i < end; i += 32) {
    row.reference = fmaxf(row.reference, states.totals[number(i)].x);
  }
  row.reference = warp_max(row.reference);
  if (row.reference == -INFINITY) return row;
  for (int chunk = first; chunk < end; chunk += kAtOnce) {
    // Past the end the last part is read again, with weight 0: no branch between the loads.
    float2 totals[kAtOnce];
    float4 sums[kAtOnce][kQuads];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int64_t state = number(min(chunk + j, end - 1));
      totals[j] = states.totals[state];
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        const int d = min(4 * lane + 128 * q, head_dim - 4);
        sums[j][q] = *reinterpret_cast<const float4*>(states.sums + state * head_dim + d);
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const bool used = chunk + j < end && totals[j].x != -INFINITY;
      const float weight = used ? exp2_fast(totals[j].x - row.reference) : 0.0f;
      row.total += used ? weight * totals[j].y : 0.0f;
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        row.sums[q].x += used ? weight * sums[j][q].x : 0.0f;
        row.sums[q].y += used ? weight * sums[j][q].y : 0.0f;
        row.sums[q].z += used ? weight * sums[j][q].z : 0.0f;
        row.sums[q].w += used ? weight * sums[j][q].w : 0.0f;
      }
    }
  }
  return row;
}

template <class T>
__device__ void write_row(const PagedAttentionParams& params, int64_t token, int64_t head,
                          const RowSums& row, int lane) {
  const int head_dim = static_cast<int>(params.cache.head_dim);
  const int64_t kv_head = head / (params.num_heads / params.cache.num_kv_heads);
  const float factor = row.total > 0.0f ? value_scale(params, kv_head) / row.total : 0.0f;
  T* out =
      static_cast<T*>(params.out) + token * params.out_stride_token + head * params.out_stride_head;
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    const int d = 4 * lane + 128 * q;
    if (d >= head_dim) continue;
    const float4& x = row.sums[q];
    *reinterpret_cast<uint2*>(out + d) =
        make_uint2(pack<T>(x.x * factor, x.y * factor), pack<T>(x.z * factor, x.w * factor));
  }
  if (params.lse != nullptr && lane == 0) {
    params.lse[token * params.lse_stride_token + head * params.lse_stride_head] =
        row.total > 0.0f ? (row.reference + log2f(row.total)) * kLn2 : -INFINITY;
  }
}

// One warp a row of pieces.
template <class T>
__global__ void __launch_bounds__(kWarps * 32)
    merge_pieces_kernel(const __grid_constant__ PagedAttentionParams params) {
  wait_previous_kernel();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= params.num_tokens * params.num_heads) return;
  const int64_t token = row / params.num_heads;
  const int64_t head = row % params.num_heads;
  // Rows of longer sequences are another kernel's, those without keys (behind a prefix) are written
  // by the decode kernel: they have no states.
  const int64_t seq = sequence_of_token(params, token);
  if (seq < 0) return;
  const int group = static_cast<int>(params.num_heads / params.cache.num_kv_heads);
  const Sequence sequence = load_sequence(params, seq);
  if (sequence.query_len * group > kMaxDecodeRows ||
      sequence.seq_len <= shared_prefix(params, seq, sequence)) {
    return;
  }
  const RowSums sums = sum_parts(piece_states(params), static_cast<int>(params.cache.head_dim), 0,
                                 static_cast<int>(params.num_splits), lane,
                                 [&](int i) { return piece_state(params, token, head, i); });
  write_row<T>(params, token, head, sums, lane);
}

template <class Kernel>
void launch(const Kernel& kernel, dim3 grid, const PagedAttentionParams& params,
            cudaStream_t stream) {
  launch_overlapped("paged_attention (merge)", kernel, grid, dim3(kWarps * 32), stream, params);
}

}  // namespace

void launch_decode_merge(const PagedAttentionParams& params, cudaStream_t stream) {
  if (params.num_splits <= 1) return;
  const bool bfloat16 = params.type == ElementType::kBFloat16;
  launch(bfloat16 ? merge_pieces_kernel<__nv_bfloat16> : merge_pieces_kernel<__half>,
         dim3(grid_size(ceil_div(params.num_tokens * params.num_heads, kWarps))), params, stream);
}

}  // namespace pagedkv::cuda
