// The launch of streamed_linear: how the input and the ring share a multiprocessor's memory.
// Instantiations: 2 types of the stream, 3 of the plain kernel.
#include <algorithm>

#include "cuda/device/overlapped_launch.cuh"
#include "cuda/linear/bits_map.h"
#include "cuda/linear/cluster_linear.h"
#include "cuda/linear/plain_linear.cuh"
#include "cuda/linear/streamed_linear_kernel.cuh"
#include "cuda/linear/tiled_linear.h"
#include "cuda/linear/wide_linear.h"
#include "pagedkv/kernels/cuda_launchers.h"

namespace pagedkv::cuda {
namespace {

using Traits = StreamTraits;

// One block a multiprocessor: a second one would find no registers. All of its shared memory then
// is the block's; less is slower, and more than one block is placed unevenly.
constexpr int64_t kSharedBytes = 220 * 1024;
constexpr int64_t kWholeInputBytes = 40 * 1024;  // a larger input comes in chunks ...
constexpr int64_t kChunkBytes = 24 * 1024;       // ... of about so much
constexpr int64_t kRowsOfOneBlock = 4;           // for more, clusters are as fast or faster
constexpr int64_t kMaxSlicedRows = 128;          // more are not worth reading the weights so often
constexpr int64_t kNormedElements = 72 * 1024;   // of input and norm: they are there whole

CUtensorMap weight_map(const StreamedLinearParams& params) {
  const cuuint64_t sizes[] = {Traits::kSlab, static_cast<cuuint64_t>(params.out_features),
                              static_cast<cuuint64_t>(params.in_features / Traits::kSlab)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(params.weight_stride_row) * 2,
                                Traits::kSlab * 2};
  const cuuint32_t box[] = {Traits::kSlab, Traits::kTileRows, Traits::kWarps};
  return bits_map("weights", params.weight, sizes, strides, box);
}

bool is_gated(const StreamedLinearParams& params) {
  return params.epilogue == LinearEpilogue::kSiluAndMul;
}

// Whether the stream takes this product of 16-bit elements. Halves of gated weights are cut in
// tiles alike.
bool can_stream(const StreamedLinearParams& params) {
  return params.num_tokens <= Traits::kRows && params.in_features % Traits::kSlab == 0 &&
         params.in_features < INT32_MAX / 4 && params.out_features < INT32_MAX / 4 &&
         (!is_gated(params) || params.out_features % (2 * Traits::kTileRows) == 0) &&
         (params.norm_weight == nullptr ||
          (params.num_tokens + 1) * params.in_features <= kNormedElements) &&
         aligned_to(16, {params.input, params.weight, params.norm_weight},
                    {params.num_tokens > 1 ? params.input_stride_token * 2 : 0,
                     params.weight_stride_row * 2});
}

// The product of the rows from `token` on, as many as the stream takes at once.
StreamedLinearParams slice_of(const StreamedLinearParams& params, int64_t token) {
  constexpr int64_t kBytes = 2;
  StreamedLinearParams slice = params;
  slice.num_tokens = std::min<int64_t>(params.num_tokens - token, Traits::kRows);
  slice.out = static_cast<char*>(params.out) + token * params.out_stride_token * kBytes;
  slice.input = static_cast<const char*>(params.input) + token * params.input_stride_token * kBytes;
  return slice;
}

template <class T>
void launch_stream(const StreamedLinearParams& params, cudaStream_t stream) {
  const auto kernel = streamed_linear_kernel<T>;
  const int64_t rows = params.num_tokens;
  const int64_t tiles_of_unit = is_gated(params) ? 2 : 1;
  StreamSetup setup{};
  setup.weight = weight_map(params);
  setup.units = static_cast<int>(ceil_div(params.out_features, Traits::kTileRows * tiles_of_unit));
  setup.slabs = static_cast<int>(params.in_features / Traits::kSlab);
  setup.steps = static_cast<int>(ceil_div(setup.slabs, Traits::kWarps));
  const int64_t step_bytes = rows * Traits::kWarps * Traits::kSlab * 2;  // of the input
  int64_t chunk = setup.steps;
  if (params.norm_weight == nullptr && chunk * step_bytes > kWholeInputBytes) {
    chunk = std::max<int64_t>(1, kChunkBytes / step_bytes);
  }
  setup.chunk = static_cast<int>(chunk);
  setup.chunks = static_cast<int>(ceil_div(setup.steps, chunk));
  // 16 bytes more than a multiple of 128: rows are read without bank conflicts.
  setup.input_pitch = static_cast<int>(chunk * step_bytes / rows + 16);
  const int64_t others = rows * setup.input_pitch * (setup.whole() ? 1 : 2) +
                         rows * 2 * Traits::kWarps * Traits::kSumsPitch * 4 +
                         (params.norm_weight != nullptr ? params.in_features * 2 : 0);
  const int64_t blocks = std::min<int64_t>(num_multiprocessors(), setup.units);
  const int64_t passes =
      ceil_div(ceil_div(setup.units, blocks) * tiles_of_unit, int64_t{Traits::kTiles});
  setup.stages = static_cast<int>(std::min({(kSharedBytes - others) / Traits::kStageBytes,
                                            int64_t{Traits::kMaxStages}, setup.steps * passes}));
  const auto shared = static_cast<int>(others + int64_t{setup.stages} * Traits::kStageBytes);
  // The limit is the kernel's, not the launch's: what one thread needs, another must not lower.
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(kSharedBytes)),
             "streamed_linear: shared memory");
  launch_overlapped("streamed_linear", kernel, grid_size(blocks), Traits::kAllThreads, shared,
                    stream, params, setup);
}

// Whether this device runs code of the stream that was compiled for Hopper, and has its memory.
template <class T>
bool has_stream() {
  cudaFuncAttributes compiled{};
  check_cuda(cudaFuncGetAttributes(&compiled, streamed_linear_kernel<T>),
             "streamed_linear: attributes");
  int device = 0, most = 0;
  check_cuda(cudaGetDevice(&device), "streamed_linear: device");
  check_cuda(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
             "streamed_linear: shared memory");
  const int64_t needed = kSharedBytes + static_cast<int64_t>(compiled.sharedSizeBytes);
  return compiled.ptxVersion >= 90 && most >= needed;
}

}  // namespace

void launch_streamed_linear(const StreamedLinearParams& params, StreamHandle stream) {
  if (params.num_tokens == 0 || params.out_features == 0) return;
  const auto at = static_cast<cudaStream_t>(stream);
  with_activation_type(params.type, [&]<class T>(std::type_identity<T>) {
    if constexpr (sizeof(T) == 2) {
      if (params.num_tokens > kRowsOfOneBlock && can_cluster_linear(params)) {
        return launch_cluster_linear(params, at);
      }
      if (can_wide_linear(params)) return launch_wide_linear(params, at);
      if (params.num_tokens <= kMaxSlicedRows && can_stream(slice_of(params, 0)) &&
          has_stream<T>()) {
        for (int64_t token = 0; token < params.num_tokens; token += Traits::kRows) {
          launch_stream<T>(slice_of(params, token), at);
        }
        return;
      }
      if (params.num_tokens > kMaxSlicedRows && can_tiled_linear(params)) {
        return launch_tiled_linear(params, at);
      }
    }
    launch_plain_linear<T>(params, at);
  });
}

}  // namespace pagedkv::cuda
