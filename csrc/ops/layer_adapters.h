// From tensors to params for the small layers: RMS norm, rotary embedding, gated activations.
// One function per op, used by the CPU and the CUDA adapter alike; reads no tensor data.
#pragma once

#include <string>

#include "ops/operand_checks.h"
#include "ops/row_scale_checks.h"
#include "pagedkv/kernels/layer_params.h"

namespace pagedkv::ops {

inline RmsNormParams rms_norm_params(const Tensor& out, const Tensor& input, const Tensor& weight,
                                     double epsilon) {
  const OperandChecks check("pagedkv::rms_norm");
  check.devices({{"input", input}, {"out", out}, {"weight", weight}});
  const ElementType type = check.activation_type({"input", input});
  check.same_dtype({"input", input}, {{"out", out}, {"weight", weight}});
  check.written_rows({"out", out}, "[num_tokens, hidden]");
  check.rows({"input", input}, "[num_tokens, hidden]");
  check.rows({"weight", weight}, "[hidden]");
  const int64_t num_tokens = input.size(0);
  const int64_t hidden = input.size(1);
  check.at_least("hidden", hidden, 1);
  check.shape({"out", out}, {num_tokens, hidden}, "[num_tokens, hidden]");
  check.shape({"weight", weight}, {hidden}, "[hidden]");
  check.apart({"out", out}, {{"weight", weight}}, /*in_place=*/{{"input", input}});
  return {.out = out.mutable_data_ptr(),
          .input = input.const_data_ptr(),
          .weight = weight.const_data_ptr(),
          .type = type,
          .num_tokens = num_tokens,
          .hidden_size = hidden,
          .out_stride_token = out.stride(0),
          .input_stride_token = input.stride(0),
          .epsilon = check.finite("epsilon", epsilon, 0.0)};
}

inline FusedAddRmsNormParams fused_add_rms_norm_params(const Tensor& input, const Tensor& residual,
                                                       const Tensor& weight, double epsilon) {
  const OperandChecks check("pagedkv::fused_add_rms_norm");
  check.devices({{"input", input}, {"residual", residual}, {"weight", weight}});
  const ElementType type = check.activation_type({"input", input});
  check.same_dtype({"input", input}, {{"residual", residual}, {"weight", weight}});
  check.written_rows({"input", input}, "[num_tokens, hidden]");
  check.written_rows({"residual", residual}, "[num_tokens, hidden]");
  check.rows({"weight", weight}, "[hidden]");
  const int64_t num_tokens = input.size(0);
  const int64_t hidden = input.size(1);
  check.at_least("hidden", hidden, 1);
  check.shape({"residual", residual}, {num_tokens, hidden}, "[num_tokens, hidden]");
  check.shape({"weight", weight}, {hidden}, "[hidden]");
  check.apart({"input", input}, {{"residual", residual}, {"weight", weight}});
  check.apart({"residual", residual}, {{"weight", weight}});
  return {.input = input.mutable_data_ptr(),
          .residual = residual.mutable_data_ptr(),
          .weight = weight.const_data_ptr(),
          .type = type,
          .num_tokens = num_tokens,
          .hidden_size = hidden,
          .input_stride_token = input.stride(0),
          .residual_stride_token = residual.stride(0),
          .epsilon = check.finite("epsilon", epsilon, 0.0)};
}

inline RotaryEmbeddingParams rotary_embedding_params(const Tensor& positions, const Tensor& query,
                                                     const Tensor& key, const Tensor& cos_sin_cache,
                                                     bool is_neox) {
  const OperandChecks check("pagedkv::rotary_embedding");
  check.devices(
      {{"query", query}, {"key", key}, {"positions", positions}, {"cos_sin_cache", cos_sin_cache}});
  const ElementType type = check.activation_type({"query", query});
  check.same_dtype({"query", query}, {{"key", key}});
  check.dtypes(ScalarType::Long, {{"positions", positions}});
  check.dtypes(ScalarType::Float, {{"cos_sin_cache", cos_sin_cache}});
  check.written_rows({"query", query}, "[num_tokens, num_heads, head_dim]");
  check.written_rows({"key", key}, "[num_tokens, num_kv_heads, head_dim]");
  check.rows({"positions", positions}, "[num_tokens]");
  check.rows({"cos_sin_cache", cos_sin_cache}, "[max_position, rotary_dim]");
  const int64_t num_tokens = query.size(0);
  const int64_t head_dim = query.size(2);
  const int64_t rotary_dim = cos_sin_cache.size(1);
  check.shape({"key", key}, {num_tokens, kAnySize, head_dim},
              "[num_tokens, num_kv_heads, head_dim]");
  check.shape({"positions", positions}, {num_tokens}, "[num_tokens]");
  check.rotary_dim(rotary_dim, head_dim);
  check.apart({"query", query},
              {{"key", key}, {"positions", positions}, {"cos_sin_cache", cos_sin_cache}});
  check.apart({"key", key}, {{"positions", positions}, {"cos_sin_cache", cos_sin_cache}});
  return {.positions = positions.const_data_ptr<int64_t>(),
          .query = query.mutable_data_ptr(),
          .key = key.mutable_data_ptr(),
          .cos_sin_cache = cos_sin_cache.const_data_ptr<float>(),
          .type = type,
          .is_neox = is_neox,
          .num_tokens = num_tokens,
          .num_heads = query.size(1),
          .num_kv_heads = key.size(1),
          .head_dim = head_dim,
          .rotary_dim = rotary_dim,
          .max_position = cos_sin_cache.size(0),
          .query_stride_token = query.stride(0),
          .query_stride_head = query.stride(1),
          .key_stride_token = key.stride(0),
          .key_stride_head = key.stride(1),
          .cos_sin_stride = cos_sin_cache.stride(0)};
}

inline ActivationParams activation_params(const char* op, const Tensor& out, const Tensor& input,
                                          Activation activation, const RowScaleOperands& scales) {
  const OperandChecks check(op);
  check.devices({{"input", input}, {"out", out}, scales.operand()});
  const ElementType type = check.activation_type({"input", input});
  check.same_dtype({"input", input}, {{"out", out}, scales.operand()});
  check.written_rows({"out", out}, "[num_tokens, intermediate]");
  check.rows({"input", input}, "[num_tokens, 2 * intermediate]");
  check.rows(scales.operand(), "[num_tokens, hidden]");
  const int64_t num_tokens = input.size(0);
  STD_TORCH_CHECK(input.size(1) % 2 == 0, check.op(), ": input has shape ",
                  list_text(input.sizes()), ", expected an even number of columns");
  const int64_t intermediate = input.size(1) / 2;
  check.shape({"out", out}, {num_tokens, intermediate}, "[num_tokens, intermediate]");
  const RowScales row_scales = checked_row_scales(check, scales, num_tokens);
  check.apart({"out", out}, {{"input", input}, scales.operand()});
  return {.out = out.mutable_data_ptr(),
          .input = input.const_data_ptr(),
          .type = type,
          .activation = activation,
          .num_tokens = num_tokens,
          .intermediate_size = intermediate,
          .out_stride_token = out.stride(0),
          .input_stride_token = input.stride(0),
          .scales = row_scales};
}

inline ActivationParams silu_and_mul_params(const Tensor& out, const Tensor& input,
                                            const RowScaleOperands& scales) {
  return activation_params("pagedkv::silu_and_mul", out, input, Activation::kSilu, scales);
}

inline ActivationParams gelu_and_mul_params(const Tensor& out, const Tensor& input,
                                            const std::string& approximate,
                                            const RowScaleOperands& scales) {
  STD_TORCH_CHECK(approximate == "none" || approximate == "tanh",
                  "pagedkv::gelu_and_mul: approximate is '", approximate,
                  "', expected 'none' or 'tanh'");
  return activation_params("pagedkv::gelu_and_mul", out, input,
                           approximate == "tanh" ? Activation::kGeluTanh : Activation::kGelu,
                           scales);
}

}  // namespace pagedkv::ops
