// The operands of RowScales, checked: for the ops that read a projection's result.
#pragma once

#include "ops/operand_checks.h"
#include "pagedkv/kernels/row_scales.h"

namespace pagedkv::ops {

struct RowScaleOperands {
  const std::optional<Tensor>& residual;
  double epsilon;

  Operand operand() const { return {"residual", residual}; }
};

// Device and dtype are checked already, and that what the op writes lies elsewhere.
inline RowScales checked_row_scales(const OperandChecks& check, const RowScaleOperands& scales,
                                    int64_t num_tokens) {
  const float epsilon = check.finite("residual_epsilon", scales.epsilon, 0.0);
  if (!scales.residual.has_value()) return {};
  const Tensor& rows = *scales.residual;
  check.shape(scales.operand(), {num_tokens, kAnySize}, "[num_tokens, hidden]");
  check.at_least("hidden", rows.size(1), 1);
  return {.rows = rows.const_data_ptr(),
          .hidden_size = rows.size(1),
          .stride_token = rows.stride(0),
          .epsilon = epsilon};
}

}  // namespace pagedkv::ops
