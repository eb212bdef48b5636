// What every launcher needs on the host: CUDA statuses as exceptions, dispatch from an ElementType
// to a C++ type, and whether 16-byte accesses are allowed. No kernel lives here. What throws is in
// launch.cpp: nvcc reads headers three times a file, and <string> and <algorithm> are the longest.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "pagedkv/kernels/element_type.h"

namespace pagedkv::cuda {

// Throws what a status says and what to do about it, unless it is success.
void check_cuda(cudaError_t status, const char* what);

// After a <<<>>> launch: a bad configuration shows only here.
void check_launch(const char* what);

int current_device();
int device_attribute(cudaDeviceAttr attribute, int device);
int num_multiprocessors();  // of the current device

[[noreturn]] void refuse_activation_type(ElementType type);

// body(std::type_identity<T>) for the activation type T.
template <class Body>
void with_activation_type(ElementType type, const Body& body) {
  switch (type) {
    case ElementType::kFloat32:
      return body(std::type_identity<float>{});
    case ElementType::kBFloat16:
      return body(std::type_identity<__nv_bfloat16>{});
    case ElementType::kFloat16:
      return body(std::type_identity<__half>{});
    default:
      refuse_activation_type(type);
  }
}

// body(std::type_identity<C>) for the cache's type C beside activations of type T.
template <class T, class Body>
void with_cache_type(ElementType cache_type, const Body& body) {
  switch (cache_type) {
    case ElementType::kFloat8E4M3:
      return body(std::type_identity<__nv_fp8_e4m3>{});
    case ElementType::kFloat8E5M2:
      return body(std::type_identity<__nv_fp8_e5m2>{});
    default:
      return body(std::type_identity<T>{});
  }
}

// Whether all pointers and all strides (in bytes) are multiples of `bytes`.
inline bool aligned_to(int64_t bytes, std::initializer_list<const void*> pointers,
                       std::initializer_list<int64_t> byte_strides) {
  for (const void* pointer : pointers) {
    if (reinterpret_cast<uintptr_t>(pointer) % bytes != 0) return false;
  }
  for (const int64_t stride : byte_strides) {
    if (stride % bytes != 0) return false;
  }
  return true;
}

// Grids have at most 2^31 - 1 blocks along x: throws for more.
unsigned grid_size(int64_t blocks);

constexpr int64_t kMaxBlockDepth = 64;  // threads of a block along z

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace pagedkv::cuda
