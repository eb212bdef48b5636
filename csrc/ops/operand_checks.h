// The checks that every adapter makes before it fills a params struct, in this order: device,
// dtype, layout, shape, memory shared between operands, then plain numbers. Each message names the
// op, the operand, what was expected and what came. Shared by the CPU and the CUDA adapters; reads
// no tensor data.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <string>

#include "ops/memory_overlap.h"
#include "pagedkv/kernels/element_type.h"

namespace pagedkv::ops {

using torch::headeronly::ScalarType;

// One tensor under its name in the schema; absent if it is an optional without a value. Borrowed.
class Operand {
 public:
  Operand(const char* name, const Tensor& tensor) : name_(name), tensor_(&tensor) {}
  Operand(const char* name, const std::optional<Tensor>& tensor)
      : name_(name), tensor_(tensor.has_value() ? &*tensor : nullptr) {}

  const char* name() const { return name_; }
  bool present() const { return tensor_ != nullptr; }
  const Tensor& tensor() const { return *tensor_; }

 private:
  const char* name_;
  const Tensor* tensor_;
};

inline std::string dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    case ScalarType::Float8_e5m2:
      return "float8_e5m2";
    default:
      return torch::headeronly::toString(type);
  }
}

inline std::string device_name(const Tensor& tensor) {
  if (tensor.is_cpu()) return "cpu";
  if (tensor.is_cuda()) return "cuda:" + std::to_string(tensor.get_device_index());
  if (tensor.device().type() == torch::headeronly::DeviceType::Meta) return "meta";
  return "a device of type " + std::to_string(static_cast<int>(tensor.device().type()));
}

template <class Sizes>
std::string list_text(const Sizes& sizes) {
  std::ostringstream text;
  text << '[';
  bool first = true;
  for (const int64_t size : sizes) {
    text << (first ? "" : ", ");
    if (size < 0) text << '*';
    if (size >= 0) text << size;
    first = false;
  }
  text << ']';
  return text.str();
}

inline constexpr int64_t kAnySize = -1;

class OperandChecks {
 public:
  explicit OperandChecks(const char* op) : op_(op) {}

  // All present operands are where the first one is.
  void devices(std::initializer_list<Operand> operands) const {
    const Operand& first = *operands.begin();
    for (const Operand& operand : operands) {
      if (!operand.present()) continue;
      STD_TORCH_CHECK(operand.tensor().device() == first.tensor().device(), op_, ": ",
                      operand.name(), " is on ", device_name(operand.tensor()), ", expected ",
                      device_name(first.tensor()), " as ", first.name());
    }
  }

  void on_cpu(const Operand& operand) const {
    STD_TORCH_CHECK(operand.tensor().is_cpu(), op_, ": ", operand.name(), " is on ",
                    device_name(operand.tensor()), ", expected cpu");
  }

  // The element type of activations: fp32, bf16 or fp16.
  ElementType activation_type(const Operand& operand) const {
    switch (operand.tensor().scalar_type()) {
      case ScalarType::Float:
        return ElementType::kFloat32;
      case ScalarType::BFloat16:
        return ElementType::kBFloat16;
      case ScalarType::Half:
        return ElementType::kFloat16;
      default:
        STD_TORCH_CHECK(false, op_, ": ", operand.name(), " has dtype ",
                        dtype_name(operand.tensor().scalar_type()),
                        ", expected float32, bfloat16 or float16");
    }
  }

  // The element type of a cache: any of activation_type's, or a float8.
  ElementType cache_type(const Operand& operand) const {
    switch (operand.tensor().scalar_type()) {
      case ScalarType::Float:
        return ElementType::kFloat32;
      case ScalarType::BFloat16:
        return ElementType::kBFloat16;
      case ScalarType::Half:
        return ElementType::kFloat16;
      case ScalarType::Float8_e4m3fn:
        return ElementType::kFloat8E4M3;
      case ScalarType::Float8_e5m2:
        return ElementType::kFloat8E5M2;
      default:
        STD_TORCH_CHECK(false, op_, ": ", operand.name(), " has dtype ",
                        dtype_name(operand.tensor().scalar_type()),
                        ", expected float32, bfloat16, float16, float8_e4m3fn or float8_e5m2");
    }
  }

  // All present operands have this dtype.
  void dtypes(ScalarType expected, std::initializer_list<Operand> operands) const {
    for (const Operand& operand : operands) {
      if (!operand.present()) continue;
      STD_TORCH_CHECK(operand.tensor().scalar_type() == expected, op_, ": ", operand.name(),
                      " has dtype ", dtype_name(operand.tensor().scalar_type()), ", expected ",
                      dtype_name(expected));
    }
  }

  // All present operands have the first one's dtype.
  void same_dtype(const Operand& first, std::initializer_list<Operand> operands) const {
    for (const Operand& operand : operands) {
      if (!operand.present()) continue;
      STD_TORCH_CHECK(operand.tensor().scalar_type() == first.tensor().scalar_type(), op_, ": ",
                      operand.name(), " has dtype ", dtype_name(operand.tensor().scalar_type()),
                      ", expected ", dtype_name(first.tensor().scalar_type()), " as ",
                      first.name());
    }
  }

  // As many dimensions as the form says ("[num_tokens, hidden]" has two).
  void rank(const Operand& operand, const char* form) const {
    if (!operand.present()) return;
    int64_t expected = 1;
    for (const char* c = form; *c != '\0'; ++c) expected += *c == ',';
    STD_TORCH_CHECK(operand.tensor().dim() == expected, op_, ": ", operand.name(), " has shape ",
                    list_text(operand.tensor().sizes()), ", expected ", form);
  }

  // rank(), and neighbours in the last dimension are neighbours in memory.
  void rows(const Operand& operand, const char* form) const {
    if (!operand.present()) return;
    rank(operand, form);
    const Tensor& tensor = operand.tensor();
    const int64_t last = tensor.dim() - 1;
    STD_TORCH_CHECK(tensor.size(last) <= 1 || tensor.stride(last) == 1, op_, ": ", operand.name(),
                    " has strides ", list_text(tensor.strides()),
                    ", expected a contiguous last dimension");
  }

  // rows(), and no two elements of an operand that is written have one address.
  void written_rows(const Operand& operand, const char* form) const {
    if (!operand.present()) return;
    rows(operand, form);
    no_overlap(operand);
  }

  void no_overlap(const Operand& operand) const {
    if (!operand.present()) return;
    const Tensor& tensor = operand.tensor();
    STD_TORCH_CHECK(has_distinct_elements(tensor), op_, ": ", operand.name(), " has strides ",
                    list_text(tensor.strides()),
                    ", expected no overlap in a tensor that is written");
  }

  // An operand that is written shares no memory with the others; it may be one of in_place, whole
  // and in the same order, but not a part of it.
  void apart(const Operand& written, std::initializer_list<Operand> others,
             std::initializer_list<Operand> in_place = {}) const {
    if (!written.present()) return;
    for (const Operand& other : others) {
      STD_TORCH_CHECK(!other.present() || !may_share_memory(written.tensor(), other.tensor()), op_,
                      ": ", written.name(), " overlaps ", other.name(),
                      " in memory, expected memory of its own for a tensor that is written");
    }
    for (const Operand& other : in_place) {
      STD_TORCH_CHECK(!other.present() || is_same_view(written.tensor(), other.tensor()) ||
                          !may_share_memory(written.tensor(), other.tensor()),
                      op_, ": ", written.name(), " overlaps ", other.name(),
                      " in memory, expected ", other.name(), " itself or memory of its own");
    }
  }

  void contiguous(const Operand& operand, const char* form) const {
    if (!operand.present()) return;
    rank(operand, form);
    STD_TORCH_CHECK(operand.tensor().is_contiguous(), op_, ": ", operand.name(), " has strides ",
                    list_text(operand.tensor().strides()), ", expected a contiguous tensor");
  }

  // The sizes, kAnySize for whatever; form says what they mean. Ranks are equal already.
  void shape(const Operand& operand, std::initializer_list<int64_t> expected,
             const char* form) const {
    if (!operand.present()) return;
    int64_t dimension = 0;
    for (const int64_t size : expected) {
      STD_TORCH_CHECK(size == kAnySize || operand.tensor().size(dimension) == size, op_, ": ",
                      operand.name(), " has shape ", list_text(operand.tensor().sizes()),
                      ", expected ", form, " = ", list_text(expected));
      ++dimension;
    }
  }

  void in_range(const char* name, int64_t value, int64_t lowest, int64_t highest) const {
    STD_TORCH_CHECK(lowest <= value && value <= highest, op_, ": ", name, " is ", value,
                    ", expected ", lowest, " to ", highest);
  }

  void at_least(const char* name, int64_t value, int64_t lowest) const {
    STD_TORCH_CHECK(value >= lowest, op_, ": ", name, " is ", value, ", expected at least ",
                    lowest);
  }

  // Columns of a table of cosines and sines for heads of head_dim elements.
  void rotary_dim(int64_t columns, int64_t head_dim) const {
    constexpr const char* kName = "rotary_dim (columns of cos_sin_cache)";
    in_range(kName, columns, 2, head_dim);
    STD_TORCH_CHECK(columns % 2 == 0, op_, ": ", kName, " is ", columns,
                    ", expected an even number");
  }

  // As fp32, finite and not below lowest.
  float finite(const char* name, double value, double lowest) const {
    const float narrow = static_cast<float>(value);
    STD_TORCH_CHECK(std::isfinite(narrow) && value >= lowest, op_, ": ", name, " is ", value,
                    ", expected a finite float32 of at least ", lowest);
    return narrow;
  }
  float finite(const char* name, double value) const {
    const float narrow = static_cast<float>(value);
    STD_TORCH_CHECK(std::isfinite(narrow), op_, ": ", name, " is ", value,
                    ", expected a finite float32");
    return narrow;
  }

  const char* op() const { return op_; }

 private:
  const char* op_;
};

}  // namespace pagedkv::ops
