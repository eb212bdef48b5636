// Adds shared prefixes to the rows that share one: out and lse hold what decode made of a row's own
// keys, the workspace the states of the prefix's parts; the row becomes the sum of all, in a fixed
// order. Started while the kernel before it still runs, it waits for its end on the device.
//
// Grid: one warp for kRows heads of a query token. What takes its time is the chain of reads before
// a row's states are known, so a warp goes through it once, and lane 8 r + i looks after state i
// (then i + 8, ...) of row r: its number, reference and weight. Instantiations: 2 types x 2. Moves
// about 2 states a row, mostly in the L2, and out twice.
#include "cuda/attention/launch.h"
#include "cuda/attention/prefix_states.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/overlapped_launch.cuh"

namespace pagedkv::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kRows = 4;    // heads of a warp
constexpr int kStates = 8;  // of a row in one round: lanes that look after it

// Where the states of a row are.
struct RowParts {
  int64_t whole;  // the only one, if count is 1
  int64_t first;  // of the first worker, if not
  int64_t next;   // of the worker behind it; the others follow
  int stride;     // from worker to worker
  int count;

  __device__ int64_t number(int i) const {
    return count == 1 ? whole : i == 0 ? first : next + static_cast<int64_t>(i - 1) * stride;
  }
};

// Row `row` of the tile that is number `tile` of the record's line. Lines have fewer than 2^32
// steps: more would take a minute.
__device__ RowParts parts_of(const PrefixRecord& record, unsigned tile, int64_t whole, int64_t cut,
                             int row) {
  constexpr int kRowsPerTile = static_cast<int>(kPrefixTileRows);
  const unsigned begin = static_cast<unsigned>(record.begin) + tile * record.tile_length;
  const unsigned range = record.range_length;
  const unsigned first = begin / range;
  const unsigned last = (begin + record.tile_length - 1) / range;
  const int64_t at = cut + row;
  return {whole, at + (2 * static_cast<int64_t>(first) + 1) * kRowsPerTile,
          at + 2 * static_cast<int64_t>(first + 1) * kRowsPerTile, 2 * kRowsPerTile,
          static_cast<int>(last - first) + 1};
}

// The sequence of a token, or -1; a batch of single-token sequences is the common case.
__device__ int64_t find_sequence(const PagedAttentionParams& params, int64_t token) {
  if (token < params.num_seqs && params.query_start_loc[token] == token &&
      params.query_start_loc[token + 1] == token + 1) {
    return token;
  }
  return sequence_of_token(params, token);
}

// The group of a sequence that takes part in it, or -1; a lane looks at every 32nd entry.
__device__ int64_t find_group(const PagedAttentionParams& params, int64_t seq, int lane) {
  for (int64_t base = 0; base < params.num_prefix_groups; base += 32) {
    const int64_t g = base + lane;
    const bool inside = g < params.num_prefix_groups && params.prefix_groups[3 * g] <= seq &&
                        seq < params.prefix_groups[3 * g] + params.prefix_groups[3 * g + 1];
    const unsigned found = __ballot_sync(0xffffffffu, inside);
    if (found != 0) return base + __ffs(static_cast<int>(found)) - 1;
  }
  return -1;
}

// kQuads: of head_dim elements a lane has, 4 * lane + 128 * i.
template <class T, int kQuads>
__global__ void __launch_bounds__(kWarps * 32)
    prefix_merge_kernel(const __grid_constant__ PagedAttentionParams params) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t token = blockIdx.x;
  const int num_heads = static_cast<int>(params.num_heads);
  const int first_head = static_cast<int>(blockIdx.y * kWarps + threadIdx.x / 32) * kRows;
  const int64_t seq = first_head < num_heads ? find_sequence(params, token) : -1;
  const int64_t index = seq < 0 ? -1 : find_group(params, seq, lane);
  PrefixGroup group{};
  Sequence sequence{};
  if (index >= 0) {
    group = load_prefix_group(params, index);
    sequence = load_sequence(params, seq);
  }
  const bool shares = group.prefix_len > 0 && takes_part(params, sequence, group.prefix_len);
  if (!shares) {
    wait_previous_kernel();  // whoever comes next in the stream waits for this kernel only
    return;
  }
  const int kv_heads = static_cast<int>(params.cache.num_kv_heads);
  const int heads = num_heads / kv_heads;
  const int head = min(first_head + lane / kStates, num_heads - 1);  // this lane's row
  const int kv_head = head / heads;
  const int group_head = head - kv_head * heads;
  const int in_group =
      static_cast<int>(token - params.query_start_loc[group.first_seq]) * heads + group_head;
  const PrefixStates states = prefix_states(params);
  float* lse = params.lse + token * params.lse_stride_token + head * params.lse_stride_head;
  wait_previous_kernel();

  constexpr int kPrefixRows = static_cast<int>(kPrefixTileRows);
  const RowParts parts =
      parts_of(states.records[index], in_group / kPrefixRows * kv_heads + kv_head,
               token * num_heads + head, states.cut_prefix, in_group % kPrefixRows);
  // What the row's weights are relative to, and the most states of any of the warp's rows.
  const float own = *lse / kLn2;
  float reference = own;
  for (int i = lane % kStates; i < parts.count; i += kStates) {
    reference = fmaxf(reference, states.totals[parts.number(i)].x);
  }
#pragma unroll
  for (int offset = 1; offset < kStates; offset *= 2) {
    reference = fmaxf(reference, __shfl_xor_sync(0xffffffffu, reference, offset));
  }
  const int rounds = __reduce_max_sync(0xffffffffu, (parts.count + kStates - 1) / kStates);

  const int head_dim = static_cast<int>(params.cache.head_dim);
  float total = 0.0f;  // this lane's states'
  float4 sums[kRows][kQuads] = {};
  for (int round = 0; round < rounds; ++round) {
    const int mine = round * kStates + lane % kStates;
    const int64_t state = mine < parts.count ? parts.number(mine) : 0;
    float weight = 0.0f;  // 0: the sums may be anything
    if (mine < parts.count && reference != -INFINITY) {
      const float2 part = states.totals[state];
      weight = exp2_fast(part.x - reference);
      total += part.x == -INFINITY ? 0.0f : weight * part.y;
    }
    const int most = __reduce_max_sync(0xffffffffu, min(kStates, parts.count - round * kStates));
#pragma unroll 2
    for (int i = 0; i < most; ++i) {
      // Loads first, and without a branch between them: sums of weight 0 are read and dropped.
      float weights[kRows];
      float4 parts[kRows][kQuads];
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        weights[row] = __shfl_sync(0xffffffffu, weight, row * kStates + i);
        const int64_t from = __shfl_sync(0xffffffffu, state, row * kStates + i);
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
          const int d = min(4 * lane + 128 * q, head_dim - 4);
          parts[row][q] = *reinterpret_cast<const float4*>(states.sums + from * head_dim + d);
        }
      }
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const float w = weights[row];
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
          sums[row][q].x += w != 0.0f ? w * parts[row][q].x : 0.0f;
          sums[row][q].y += w != 0.0f ? w * parts[row][q].y : 0.0f;
          sums[row][q].z += w != 0.0f ? w * parts[row][q].z : 0.0f;
          sums[row][q].w += w != 0.0f ? w * parts[row][q].w : 0.0f;
        }
      }
    }
  }
#pragma unroll
  for (int offset = 1; offset < kStates; offset *= 2) {
    total += __shfl_xor_sync(0xffffffffu, total, offset);
  }

  // The own keys' row is normalised and scaled: its weight is all that its sum of weights was.
  const float own_weight = own == -INFINITY ? 0.0f : exp2_fast(own - reference);
  total += own_weight;
  const float factor = total > 0.0f ? value_scale(params, kv_head) / total : 0.0f;
  const float own_factor = total > 0.0f ? own_weight / total : 0.0f;
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const float f = __shfl_sync(0xffffffffu, factor, row * kStates);
    const float g = __shfl_sync(0xffffffffu, own_factor, row * kStates);
    if (first_head + row >= num_heads) break;
    T* out = static_cast<T*>(params.out) + token * params.out_stride_token +
             (first_head + row) * params.out_stride_head;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const int d = 4 * lane + 128 * q;
      if (d >= head_dim) continue;
      auto* at = reinterpret_cast<uint2*>(out + d);
      const auto before = *reinterpret_cast<const Vec<T, 4>*>(at);
      const auto own = [&](int i) { return to_float(before.data[i]) * g; };
      const float4& x = sums[row][q];
      *at = make_uint2(pack<T>(fmaf(x.x, f, own(0)), fmaf(x.y, f, own(1))),
                       pack<T>(fmaf(x.z, f, own(2)), fmaf(x.w, f, own(3))));
    }
  }
  if (lane % kStates == 0 && first_head + lane / kStates < num_heads) {
    *lse = total > 0.0f ? (reference + log2f(total)) * kLn2 : -INFINITY;
  }
}

}  // namespace

void launch_prefix_merge(const PagedAttentionParams& params, cudaStream_t stream) {
  const bool bfloat16 = params.type == ElementType::kBFloat16;
  const bool long_heads = params.cache.head_dim > 128;
  auto* kernel =
      bfloat16 ? (long_heads ? prefix_merge_kernel<__nv_bfloat16, 2>
                             : prefix_merge_kernel<__nv_bfloat16, 1>)
               : (long_heads ? prefix_merge_kernel<__half, 2> : prefix_merge_kernel<__half, 1>);
  launch_overlapped("paged_attention (prefix merge)", kernel,
                    dim3(grid_size(params.num_tokens),
                         static_cast<unsigned>(ceil_div(params.num_heads, kWarps * kRows))),
                    dim3(kWarps * 32), stream, params);
}

}  // namespace pagedkv::cuda
