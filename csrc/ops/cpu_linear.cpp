// CPU adapter of streamed_linear: check, fill params, launch.
#include <torch/csrc/stable/library.h>

#include "ops/cpu_thread_pool.h"
#include "ops/linear_adapters.h"
#include "pagedkv/kernels/cpu_launchers.h"

namespace pagedkv::ops {
namespace {

void streamed_linear(const Tensor& out, const Tensor& input, const Tensor& weight,
                     const std::optional<Tensor>& bias, const std::optional<Tensor>& norm_weight,
                     double epsilon, const std::string& epilogue) {
  cpu::launch_streamed_linear(
      streamed_linear_params(out, input, weight, bias, norm_weight, epsilon, epilogue),
      torch_thread_pool());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagedkv, CPU, library) {
  library.impl("streamed_linear", TORCH_BOX(&streamed_linear));
}

}  // namespace pagedkv::ops
