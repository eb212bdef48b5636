// The launch of streamed_linear of 129 to 256 rows. Instantiations: 2 types x 2 shapes.
#include "cuda/device/overlapped_launch.cuh"
#include "cuda/linear/bits_map.h"
#include "cuda/linear/wide_linear.h"
#include "cuda/linear/wide_linear_kernel.cuh"

namespace pagedkv::cuda {
namespace {

constexpr int64_t kMinRows = 129;  // fewer are multiplied in clusters
constexpr int64_t kMaxRows = 256;
using FewerRows = WideShape<3, 1>;  // up to 192
using AllRows = WideShape<2, 2>;
static_assert(AllRows::kRows == kMaxRows);

template <class Shape>
CUtensorMap weight_map(const StreamedLinearParams& params) {
  const cuuint64_t row_bytes = static_cast<cuuint64_t>(params.weight_stride_row) * 2;
  const auto rows = static_cast<cuuint64_t>(params.out_features) / 2;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(params.in_features), rows, 2};
  const cuuint64_t strides[] = {row_bytes, row_bytes * rows};
  const cuuint32_t box[] = {Shape::kSlab, Shape::kColumns, 2};
  return bits_map("weights", params.weight, sizes, strides, box);
}

template <class Shape>
CUtensorMap input_map(const StreamedLinearParams& params) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(params.in_features),
                              static_cast<cuuint64_t>(params.num_tokens)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(params.input_stride_token) * 2};
  const cuuint32_t box[] = {Shape::kSlab, Shape::kRows};
  return bits_map("input", params.input, sizes, strides, box);
}

template <class T, class Shape>
void launch_shape(const StreamedLinearParams& params, cudaStream_t stream) {
  const auto kernel = wide_linear_kernel<T, Shape>;
  WideSetup setup{};
  setup.weight = weight_map<Shape>(params);
  setup.input = input_map<Shape>(params);
  setup.steps = static_cast<int>(ceil_div(params.in_features, int64_t{Shape::kSlab}));
  check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kRingBytes),
      "streamed_linear: shared memory");
  const int64_t blocks = ceil_div(params.out_features / 2, int64_t{Shape::kColumns});
  launch_overlapped("streamed_linear", kernel, grid_size(blocks), Shape::kAllThreads,
                    Shape::kRingBytes, stream, params, setup);
}

// Whether the code that this device runs is that of 9.0a: the kernel's barriers are shared memory.
bool has_wide_products() {
  if (device_attribute(cudaDevAttrComputeCapabilityMajor, current_device()) != 9) return false;
  cudaFuncAttributes compiled{};
  check_cuda(cudaFuncGetAttributes(&compiled, wide_linear_kernel<__half, FewerRows>),
             "streamed_linear: attributes");
  const int most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, current_device());
  const auto fixed = static_cast<int64_t>(compiled.sharedSizeBytes);
  return fixed > 0 && most >= WideTraits::kSharedBytes + fixed;
}

}  // namespace

bool can_wide_linear(const StreamedLinearParams& params) {
  return params.num_tokens >= kMinRows && params.num_tokens <= kMaxRows &&
         element_bytes(params.type) == 2 && params.epilogue == LinearEpilogue::kSiluAndMul &&
         params.norm_weight == nullptr && params.bias == nullptr && params.out_features % 16 == 0 &&
         params.in_features < INT32_MAX / 4 && params.out_features < INT32_MAX / 4 &&
         aligned_to(16, {params.out, params.input, params.weight},
                    {params.out_stride_token * 2, params.input_stride_token * 2,
                     params.weight_stride_row * 2}) &&
         has_wide_products();
}

void launch_wide_linear(const StreamedLinearParams& params, cudaStream_t stream) {
  with_activation_type(params.type, [&]<class T>(std::type_identity<T>) {
    if constexpr (sizeof(T) == 2) {
      if (params.num_tokens <= FewerRows::kRows) return launch_shape<T, FewerRows>(params, stream);
      launch_shape<T, AllRows>(params, stream);
    }
  });
}

}  // namespace pagedkv::cuda
