// From tensors to params for streamed_linear, used by the CPU and the CUDA adapter alike; reads no
// tensor data.
#pragma once

#include <string>

#include "ops/operand_checks.h"
#include "pagedkv/kernels/linear_params.h"

namespace pagedkv::ops {

inline LinearEpilogue linear_epilogue(const OperandChecks& check, const std::string& name) {
  if (name == "store") return LinearEpilogue::kStore;
  if (name == "add") return LinearEpilogue::kAdd;
  STD_TORCH_CHECK(name == "silu_and_mul", check.op(), ": epilogue is '", name,
                  "', expected 'store', 'add' or 'silu_and_mul'");
  return LinearEpilogue::kSiluAndMul;
}

inline StreamedLinearParams streamed_linear_params(const Tensor& out, const Tensor& input,
                                                   const Tensor& weight,
                                                   const std::optional<Tensor>& bias,
                                                   const std::optional<Tensor>& norm_weight,
                                                   double epsilon, const std::string& epilogue) {
  const OperandChecks check("pagedkv::streamed_linear");
  check.devices({{"input", input},
                 {"out", out},
                 {"weight", weight},
                 {"bias", bias},
                 {"norm_weight", norm_weight}});
  const ElementType type = check.activation_type({"input", input});
  check.same_dtype(
      {"input", input},
      {{"out", out}, {"weight", weight}, {"bias", bias}, {"norm_weight", norm_weight}});
  check.written_rows({"out", out}, "[num_tokens, out_features]");
  check.rows({"input", input}, "[num_tokens, in_features]");
  check.rows({"weight", weight}, "[out_features, in_features]");
  check.rows({"bias", bias}, "[out_features]");
  check.rows({"norm_weight", norm_weight}, "[in_features]");
  const int64_t num_tokens = input.size(0);
  const int64_t in_features = input.size(1);
  const int64_t out_features = weight.size(0);
  const LinearEpilogue what = linear_epilogue(check, epilogue);
  check.at_least("in_features", in_features, 1);
  check.shape({"weight", weight}, {kAnySize, in_features}, "[out_features, in_features]");
  check.shape({"bias", bias}, {out_features}, "[out_features]");
  check.shape({"norm_weight", norm_weight}, {in_features}, "[in_features]");
  if (what == LinearEpilogue::kSiluAndMul) {
    STD_TORCH_CHECK(out_features % 2 == 0, check.op(), ": weight has shape ",
                    list_text(weight.sizes()),
                    ", expected an even number of rows for epilogue 'silu_and_mul'");
    check.shape({"out", out}, {num_tokens, out_features / 2}, "[num_tokens, out_features / 2]");
  } else {
    check.shape({"out", out}, {num_tokens, out_features}, "[num_tokens, out_features]");
  }
  check.apart({"out", out},
              {{"input", input}, {"weight", weight}, {"bias", bias}, {"norm_weight", norm_weight}});
  const auto data = [](const std::optional<Tensor>& tensor) {
    return tensor.has_value() ? tensor->const_data_ptr() : nullptr;
  };
  return {.out = out.mutable_data_ptr(),
          .input = input.const_data_ptr(),
          .weight = weight.const_data_ptr(),
          .bias = data(bias),
          .norm_weight = data(norm_weight),
          .type = type,
          .epilogue = what,
          .num_tokens = num_tokens,
          .in_features = in_features,
          .out_features = out_features,
          .out_stride_token = out.stride(0),
          .input_stride_token = input.stride(0),
          .weight_stride_row = weight.stride(0),
          .epsilon = check.finite("epsilon", epsilon, 0.0)};
}

}  // namespace pagedkv::ops
