// The first kernel of sample_tokens and score_tokens: the largest logit of each chunk and, of rows
// that are drawn, the sum of e^((x - largest) / temperature) in it.
//
// Grid: x walks the rows, y pieces of a row; a warp reads chunks of its block's piece in turn. Must
// move the logits, once. Sums are made in one order, whatever the grid is. What hides the memory's
// latency is the number of warps: to read a chunk ahead takes registers, and was 7 % slower.
// Instantiations: 3 types.
#include "cuda/device/overlapped_launch.cuh"
#include "cuda/sampling/chunk.cuh"
#include "cuda/sampling/scan_logits.h"

namespace pagedkv::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMostTurns = 4;  // chunks of a warp
constexpr int kBlocksPerMultiprocessor = 8;

template <class T>
__global__ void __launch_bounds__(kThreads)
    scan_logits_kernel(const __grid_constant__ LogitRows rows, const float* inverse_temperatures,
                       int turns) {
  begin_overlapped_kernel();
  const int64_t row = blockIdx.x;
  const LogitRow<T> logits(rows, row);
  const int num_chunks = static_cast<int>(rows.num_chunks);
  float2* stats = static_cast<float2*>(rows.workspace) + row * num_chunks;
  const float scale = scale_of(inverse_temperatures == nullptr ? 1.0f : inverse_temperatures[row]);
  int chunk = static_cast<int>(blockIdx.y) * turns * kWarps + static_cast<int>(threadIdx.x) / 32;
  for (int turn = 0; turn < turns && chunk < num_chunks; ++turn, chunk += kWarps) {
    float x[kLaneLogits];
    logits.read(chunk, x);
    const float largest = value_of(chunk_max_key(x));
    float sum = 0.0f;
    if (scale != 0.0f && largest > -INFINITY) {
#pragma unroll
      for (int i = 0; i < kLaneLogits; ++i) x[i] = weight_of(x[i], largest, scale);
#pragma unroll
      for (int width = kLaneLogits / 2; width > 0; width /= 2) {
#pragma unroll
        for (int i = 0; i < width; ++i) x[i] += x[i + width];
      }
      sum = warp_sum(x[0]);
    }
    if (threadIdx.x % 32 == 0) stats[chunk] = make_float2(largest, sum);
  }
}

}  // namespace

void launch_scan_logits(const LogitRows& rows, const float* inverse_temperatures,
                        StreamHandle stream) {
  // As many turns as still leave work for all multiprocessors.
  const int64_t enough = kBlocksPerMultiprocessor * num_multiprocessors();
  const int64_t most = rows.num_rows * ceil_div(rows.num_chunks, kWarps);
  const auto turns = static_cast<int>(min(max(most / enough, int64_t{1}), int64_t{kMostTurns}));
  const dim3 grid(grid_size(rows.num_rows),
                  static_cast<unsigned>(ceil_div(rows.num_chunks, turns * kWarps)));
  with_activation_type(rows.type, [&]<class T>(std::type_identity<T>) {
    launch_overlapped("scan_logits", scan_logits_kernel<T>, grid, kThreads,
                      static_cast<cudaStream_t>(stream), rows, inverse_temperatures, turns);
  });
}

}  // namespace pagedkv::cuda
