// The element types of kernel operands, and their sizes. Plain C++: no torch, no CUDA header.
// Every params struct names the type of its data by this enum; launchers dispatch on it.
#pragma once

#include <cstdint>
#include <cstdio>
#include <exception>

namespace pagedkv {

enum class ElementType : int8_t {
  kFloat32,
  kBFloat16,
  kFloat16,
  kFloat8E4M3,  // e4m3fn: 4 exponent bits, no infinity, largest 448. Caches only.
  kFloat8E5M2,  // e5m2: IEEE-like with infinities, largest finite 57344. Caches only.
};

// Its text is made without std::string, whose header costs every CUDA file a second to compile.
class UnknownElementType : public std::exception {
 public:
  explicit UnknownElementType(ElementType type) {
    std::snprintf(text_, sizeof text_, "unknown ElementType %d", static_cast<int>(type));
  }
  const char* what() const noexcept override { return text_; }

 private:
  char text_[32];
};

constexpr int64_t element_bytes(ElementType type) {
  switch (type) {
    case ElementType::kFloat32:
      return 4;
    case ElementType::kBFloat16:
    case ElementType::kFloat16:
      return 2;
    case ElementType::kFloat8E4M3:
    case ElementType::kFloat8E5M2:
      return 1;
  }
  throw UnknownElementType(type);
}

constexpr bool is_float8(ElementType type) {
  return type == ElementType::kFloat8E4M3 || type == ElementType::kFloat8E5M2;
}

constexpr const char* element_name(ElementType type) {
  switch (type) {
    case ElementType::kFloat32:
      return "float32";
    case ElementType::kBFloat16:
      return "bfloat16";
    case ElementType::kFloat16:
      return "float16";
    case ElementType::kFloat8E4M3:
      return "float8_e4m3fn";
    case ElementType::kFloat8E5M2:
      return "float8_e5m2";
  }
  throw UnknownElementType(type);
}

}  // namespace pagedkv
