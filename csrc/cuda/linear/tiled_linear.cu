// The launch of streamed_linear for many rows. Instantiations: 2 types x 3
// epilogues x {a pair, a block}.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda/linear/bits_map.h"
#include "cuda/linear/tiled_linear.h"
#include "cuda/linear/tiled_linear_kernel.cuh"

namespace pagedkv::cuda {
namespace {

using Traits = TiledTraits;

constexpr int kPair = 2;        // of blocks, which share the weights that they copy
constexpr int kGroupRows = 16;  // of tiles of blocks: their rows of x stay in the L2

CUtensorMap tile_input_map(const StreamedLinearParams& params) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(params.in_features),
                              static_cast<cuuint64_t>(params.num_tokens)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(params.input_stride_token) * 2};
  const cuuint32_t box[] = {Traits::kSlab, Traits::kTileRows};
  return bits_map("input", params.input, sizes, strides, box);
}

// With a gate its rows and the others are apart: rows past the end of one are not the other's.
CUtensorMap tile_weight_map(const StreamedLinearParams& params, int blocks) {
  const cuuint64_t halves = params.epilogue == LinearEpilogue::kSiluAndMul ? 2 : 1;
  const cuuint64_t row_bytes = static_cast<cuuint64_t>(params.weight_stride_row) * 2;
  const cuuint64_t rows = static_cast<cuuint64_t>(params.out_features) / halves;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(params.in_features), rows, halves};
  const cuuint64_t strides[] = {row_bytes, row_bytes * rows};
  const cuuint32_t box[] = {Traits::kSlab, static_cast<cuuint32_t>(part_rows(blocks)), 1};
  return bits_map("weights", params.weight, sizes, strides, box);
}

int64_t out_columns(const StreamedLinearParams& params) {
  return params.out_features / (params.epilogue == LinearEpilogue::kSiluAndMul ? 2 : 1);
}

// Elements are numbers here, so that they can be added.
CUtensorMap tile_out_map(const StreamedLinearParams& params) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(out_columns(params)),
                              static_cast<cuuint64_t>(params.num_tokens)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(params.out_stride_token) * 2};
  const cuuint32_t box[] = {Traits::kSlab, Traits::kWarpRows}, ones[] = {1, 1};
  CUtensorMap map{};
  const CUresult status =
      tensor_map_encoder()(&map,
                           params.type == ElementType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                                 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                           2, params.out, sizes, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                           CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                           CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error("pagedkv: no tensor map for out of " +
                             std::to_string(params.num_tokens) + " rows, " +
                             std::to_string(strides[0]) + " bytes apart: CUDA driver error " +
                             std::to_string(static_cast<int>(status)));
  }
  return map;
}

template <class T, LinearEpilogue kEpilogue, int kBlocks>
void launch_clusters(const StreamedLinearParams& params, TiledSetup setup, cudaStream_t stream) {
  const auto kernel = tiled_linear_kernel<T, kEpilogue, kBlocks>;
  setup.weight = tile_weight_map(params, kBlocks);
  setup.row_tiles = static_cast<int>(ceil_div(params.num_tokens, kBlocks * Traits::kTileRows));
  setup.group_rows = kGroupRows / kBlocks;
  const int64_t tiles = int64_t{setup.row_tiles} * setup.column_tiles;
  // The limit is the kernel's, not the launch's: what one thread needs, another must not lower.
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  Traits::kSharedBytes),
             "streamed_linear: shared memory");
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kBlocks, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid_size(std::min<int64_t>(tiles, num_multiprocessors() / kBlocks) * kBlocks);
  config.blockDim = Traits::kThreads;
  config.dynamicSmemBytes = Traits::kSharedBytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  check_cuda(cudaLaunchKernelEx(&config, kernel, setup), "streamed_linear");
}

// Pairs of blocks, unless blocks alone have fewer tiles one after the other.
template <class T, LinearEpilogue kEpilogue>
void launch_tiles(const StreamedLinearParams& params, cudaStream_t stream) {
  TiledSetup setup{};
  setup.input = tile_input_map(params);
  setup.out = tile_out_map(params);
  setup.column_tiles = static_cast<int>(ceil_div(out_columns(params), tile_columns(kEpilogue)));
  setup.steps = static_cast<int>(params.in_features / Traits::kSlab);
  const int64_t multiprocessors = num_multiprocessors();
  const auto rounds = [&](int64_t blocks) {
    const int64_t row_tiles = ceil_div(params.num_tokens, blocks * Traits::kTileRows);
    return ceil_div(row_tiles * setup.column_tiles, std::max<int64_t>(1, multiprocessors / blocks));
  };
  if (multiprocessors >= kPair && rounds(kPair) <= rounds(1)) {
    launch_clusters<T, kEpilogue, kPair>(params, setup, stream);
  } else {
    launch_clusters<T, kEpilogue, 1>(params, setup, stream);
  }
}

template <class T>
void launch_epilogue(const StreamedLinearParams& params, cudaStream_t stream) {
  switch (params.epilogue) {
    case LinearEpilogue::kStore:
      return launch_tiles<T, LinearEpilogue::kStore>(params, stream);
    case LinearEpilogue::kAdd:
      return launch_tiles<T, LinearEpilogue::kAdd>(params, stream);
    case LinearEpilogue::kSiluAndMul:
      return launch_tiles<T, LinearEpilogue::kSiluAndMul>(params, stream);
    default:
      throw std::runtime_error("pagedkv: no tiles for epilogue " +
                               std::to_string(static_cast<int>(params.epilogue)));
  }
}

// Whether the code that this device runs is that of 9.0a: the kernel's barriers are shared memory.
bool has_tiles() {
  if (device_attribute(cudaDevAttrComputeCapabilityMajor, current_device()) != 9) return false;
  cudaFuncAttributes compiled{};
  check_cuda(
      cudaFuncGetAttributes(&compiled, tiled_linear_kernel<__half, LinearEpilogue::kStore, kPair>),
      "streamed_linear: attributes");
  const int most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, current_device());
  const auto fixed = static_cast<int64_t>(compiled.sharedSizeBytes);
  return fixed > 0 && most >= Traits::kSharedBytes + fixed;
}

}  // namespace

bool can_tiled_linear(const StreamedLinearParams& params) {
  return element_bytes(params.type) == 2 && params.bias == nullptr &&
         params.norm_weight == nullptr && params.in_features % Traits::kSlab == 0 &&
         params.in_features >= kMinSteps * Traits::kSlab && params.in_features < INT32_MAX / 4 &&
         out_columns(params) % 8 == 0 && params.out_features < INT32_MAX / 4 &&
         params.num_tokens < INT32_MAX / 4 &&
         aligned_to(16, {params.input, params.weight, params.out},
                    {params.input_stride_token * 2, params.weight_stride_row * 2,
                     params.out_stride_token * 2}) &&
         has_tiles();
}

void launch_tiled_linear(const StreamedLinearParams& params, cudaStream_t stream) {
  with_activation_type(params.type, [&]<class T>(std::type_identity<T>) {
    if constexpr (sizeof(T) == 2) launch_epilogue<T>(params, stream);
  });
}

}  // namespace pagedkv::cuda
