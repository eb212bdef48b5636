// The refusals of element_dispatch.h.
#include "cpu/element_dispatch.h"

#include <stdexcept>
#include <string>

namespace pagedkv::cpu {

void throw_no_activation_kernel(ElementType activation) {
  throw std::runtime_error(std::string("no CPU kernel for activations of ") +
                           element_name(activation));
}

void throw_no_cache_kernel(ElementType cache, ElementType activation) {
  throw std::runtime_error(std::string("no CPU kernel for a cache of ") + element_name(cache) +
                           " with activations of " + element_name(activation));
}

}  // namespace pagedkv::cpu
