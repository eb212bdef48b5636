// From an ElementType, known at run time, to a storage type, known at compile time. The callable
// is a generic lambda that takes a value of that type, which it must not read.
#pragma once

#include "cpu/simd/element.h"
#include "pagedkv/kernels/element_type.h"

namespace pagedkv::cpu {

// Throws std::runtime_error. Not inline, and in a file of its own: the code of std::string must not
// be compiled for an instruction set that not every processor has.
[[noreturn]] void throw_no_activation_kernel(ElementType activation);
[[noreturn]] void throw_no_cache_kernel(ElementType cache, ElementType activation);

// fp32, bf16, fp16.
template <class F>
void dispatch_activation_type(ElementType type, const F& f) {
  switch (type) {
    case ElementType::kFloat32:
      return f(float{});
    case ElementType::kBFloat16:
      return f(BFloat16{});
    case ElementType::kFloat16:
      return f(Float16{});
    default:
      throw_no_activation_kernel(type);
  }
}

// f(activation, stored): a cache holds its activations' type or a float8.
template <class F>
void dispatch_cache_types(ElementType activation, ElementType cache, const F& f) {
  dispatch_activation_type(activation, [&](auto value) {
    switch (cache) {
      case ElementType::kFloat8E4M3:
        return f(value, Float8E4M3{});
      case ElementType::kFloat8E5M2:
        return f(value, Float8E5M2{});
      default:
        if (cache == activation) return f(value, value);
        throw_no_cache_kernel(cache, activation);
    }
  });
}

}  // namespace pagedkv::cpu
