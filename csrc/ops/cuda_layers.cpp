// CUDA adapters of the small layers: check, fill params, launch on the current stream.
#include <torch/csrc/stable/library.h>

#include "ops/cuda_context.h"
#include "ops/layer_adapters.h"

namespace pagedkv::ops {
namespace {

void rms_norm(const Tensor& out, const Tensor& input, const Tensor& weight, double epsilon) {
  const RmsNormParams params = rms_norm_params(out, input, weight, epsilon);
  const CudaContext context(input);
  cuda::launch_rms_norm(params, context.stream());
}

void fused_add_rms_norm(const Tensor& input, const Tensor& residual, const Tensor& weight,
                        double epsilon) {
  const FusedAddRmsNormParams params = fused_add_rms_norm_params(input, residual, weight, epsilon);
  const CudaContext context(input);
  cuda::launch_fused_add_rms_norm(params, context.stream());
}

void rotary_embedding(const Tensor& positions, const Tensor& query, const Tensor& key,
                      const Tensor& cos_sin_cache, bool is_neox) {
  const RotaryEmbeddingParams params =
      rotary_embedding_params(positions, query, key, cos_sin_cache, is_neox);
  const CudaContext context(query);
  cuda::launch_rotary_embedding(params, context.stream());
}

void silu_and_mul(const Tensor& out, const Tensor& input, const std::optional<Tensor>& residual,
                  double residual_epsilon) {
  const ActivationParams params = silu_and_mul_params(out, input, {residual, residual_epsilon});
  const CudaContext context(input);
  cuda::launch_activation(params, context.stream());
}

void gelu_and_mul(const Tensor& out, const Tensor& input, const std::string& approximate,
                  const std::optional<Tensor>& residual, double residual_epsilon) {
  const ActivationParams params =
      gelu_and_mul_params(out, input, approximate, {residual, residual_epsilon});
  const CudaContext context(input);
  cuda::launch_activation(params, context.stream());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagedkv, CUDA, library) {
  library.impl("rms_norm", TORCH_BOX(&rms_norm));
  library.impl("fused_add_rms_norm", TORCH_BOX(&fused_add_rms_norm));
  library.impl("rotary_embedding", TORCH_BOX(&rotary_embedding));
  library.impl("silu_and_mul", TORCH_BOX(&silu_and_mul));
  library.impl("gelu_and_mul", TORCH_BOX(&gelu_and_mul));
}

}  // namespace pagedkv::ops
