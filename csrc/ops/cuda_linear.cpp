// CUDA adapter of streamed_linear: check, fill params, launch on the current stream.
#include <torch/csrc/stable/library.h>

#include "ops/cuda_context.h"
#include "ops/linear_adapters.h"

namespace pagedkv::ops {
namespace {

void streamed_linear(const Tensor& out, const Tensor& input, const Tensor& weight,
                     const std::optional<Tensor>& bias, const std::optional<Tensor>& norm_weight,
                     double epsilon, const std::string& epilogue) {
  const StreamedLinearParams params =
      streamed_linear_params(out, input, weight, bias, norm_weight, epsilon, epilogue);
  const CudaContext context(input);
  cuda::launch_streamed_linear(params, context.stream());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagedkv, CUDA, library) {
  library.impl("streamed_linear", TORCH_BOX(&streamed_linear));
}

}  // namespace pagedkv::ops
