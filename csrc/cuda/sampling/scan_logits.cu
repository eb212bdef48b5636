// The first kernel of sample_tokens: the largest logit of each chunk and, of rows that are drawn,
// the sum of e^((x - largest) / temperature) in it.
//
// Grid: x walks the rows, y pieces of a row; a warp reads chunks of its block's piece in turn. Must
// move the logits, once. Sums are made in one order, whatever the grid is.
// Instantiations: 3 types x {16-byte, single} accesses = 6.
#include "cuda/device/overlapped_launch.cuh"
#include "cuda/sampling/chunk.cuh"
#include "cuda/sampling/sample_tokens.h"

namespace pagedkv::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMostTurns = 4;  // chunks of a warp
constexpr int kBlocksPerMultiprocessor = 8;

template <class T, int kVec>
__global__ void __launch_bounds__(kThreads)
    scan_logits_kernel(const __grid_constant__ SampleTokensParams params, int turns) {
  begin_overlapped_kernel();
  const int64_t row = blockIdx.x;
  const LogitRow<T, kVec> logits(params, row);
  const int num_chunks = static_cast<int>(params.num_chunks);
  float2* stats = static_cast<float2*>(params.workspace) + row * num_chunks;
  const float scale = params.inverse_temperatures[row] * kLog2E;
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

bool has_wide_rows(const SampleTokensParams& params) {
  return aligned_to(16, {params.logits}, {params.logits_stride_row * element_bytes(params.type)});
}

void launch_scan_logits(const SampleTokensParams& params, StreamHandle stream) {
  // As many turns as still leave work for all multiprocessors.
  const int64_t enough = kBlocksPerMultiprocessor * num_multiprocessors();
  const int64_t most = params.num_rows * ceil_div(params.num_chunks, kWarps);
  const auto turns = static_cast<int>(std::clamp<int64_t>(most / enough, 1, kMostTurns));
  const dim3 grid(grid_size(params.num_rows),
                  static_cast<unsigned>(ceil_div(params.num_chunks, turns * kWarps)));
  with_activation_type(params.type, [&]<class T>(std::type_identity<T>) {
    auto* kernel =
        has_wide_rows(params) ? scan_logits_kernel<T, kVecElements<T>> : scan_logits_kernel<T, 1>;
    launch_overlapped("sample_tokens", kernel, grid, kThreads, static_cast<cudaStream_t>(stream),
                      params, turns);
  });
}

}  // namespace pagedkv::cuda
