// From an ElementType, known at run time, to a storage type, known at compile time. The callable
// is a generic lambda that takes a value of that type, which it must not read.
#pragma once

#include <stdexcept>
#include <string>

#include "cpu/simd/element.h"
#include "pagedkv/kernels/element_type.h"

namespace pagedkv::cpu {

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
      throw std::runtime_error(std::string("no CPU kernel for activations of ") +
                               element_name(type));
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
        throw std::runtime_error(std::string("no CPU kernel for a cache of ") +
                                 element_name(cache) + " with activations of " +
                                 element_name(activation));
    }
  });
}

}  // namespace pagedkv::cpu
