// CPU adapters of the small layers: check, fill params, launch.
#include <torch/csrc/stable/library.h>

#include "ops/cpu_bounds.h"
#include "ops/cpu_thread_pool.h"
#include "ops/layer_adapters.h"
#include "pagedkv/kernels/cpu_launchers.h"

namespace pagedkv::ops {
namespace {

void rms_norm(const Tensor& out, const Tensor& input, const Tensor& weight, double epsilon) {
  cpu::launch_rms_norm(rms_norm_params(out, input, weight, epsilon), torch_thread_pool());
}

void fused_add_rms_norm(const Tensor& input, const Tensor& residual, const Tensor& weight,
                        double epsilon) {
  cpu::launch_fused_add_rms_norm(fused_add_rms_norm_params(input, residual, weight, epsilon),
                                 torch_thread_pool());
}

void rotary_embedding(const Tensor& positions, const Tensor& query, const Tensor& key,
                      const Tensor& cos_sin_cache, bool is_neox) {
  const RotaryEmbeddingParams params =
      rotary_embedding_params(positions, query, key, cos_sin_cache, is_neox);
  check_positions("pagedkv::rotary_embedding", params.positions, params.num_tokens,
                  params.max_position);
  cpu::launch_rotary_embedding(params, torch_thread_pool());
}

void silu_and_mul(const Tensor& out, const Tensor& input, const std::optional<Tensor>& residual,
                  double residual_epsilon) {
  cpu::launch_activation(silu_and_mul_params(out, input, {residual, residual_epsilon}),
                         torch_thread_pool());
}

void gelu_and_mul(const Tensor& out, const Tensor& input, const std::string& approximate,
                  const std::optional<Tensor>& residual, double residual_epsilon) {
  cpu::launch_activation(gelu_and_mul_params(out, input, approximate, {residual, residual_epsilon}),
                         torch_thread_pool());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagedkv, CPU, library) {
  library.impl("rms_norm", TORCH_BOX(&rms_norm));
  library.impl("fused_add_rms_norm", TORCH_BOX(&fused_add_rms_norm));
  library.impl("rotary_embedding", TORCH_BOX(&rotary_embedding));
  library.impl("silu_and_mul", TORCH_BOX(&silu_and_mul));
  library.impl("gelu_and_mul", TORCH_BOX(&gelu_and_mul));
}

}  // namespace pagedkv::ops
