// From tensors to params for read_file. Used by the CPU and the CUDA adapter alike.
#pragma once

#include <cstdint>
#include <optional>

#include "ops/operand_checks.h"
#include "pagedkv/kernels/read_file.h"

namespace pagedkv::ops {

// Where target and staging may be is the adapter's to check.
inline ReadFileParams read_file_params(const Tensor& target, int64_t fd, int64_t offset,
                                       const std::optional<Tensor>& staging) {
  const OperandChecks check("pagedkv::read_file");
  check.dtypes(ScalarType::Byte, {{"target", target}, {"staging", staging}});
  check.contiguous({"target", target}, "[num_bytes]");
  check.contiguous({"staging", staging}, "[staging_bytes]");
  check.in_range("fd", fd, 0, INT32_MAX);
  check.at_least("offset", offset, 0);
  return {.target = target.mutable_data_ptr(),
          .staging = staging.has_value() ? staging->mutable_data_ptr() : nullptr,
          .num_bytes = target.size(0),
          .staging_bytes = staging.has_value() ? staging->size(0) : 0,
          .offset = offset,
          .fd = static_cast<int>(fd)};
}

}  // namespace pagedkv::ops
