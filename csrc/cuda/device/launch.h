// What every launcher needs on the host: CUDA statuses as exceptions, dispatch from an ElementType
// to a C++ type, and whether 16-byte accesses are allowed. No kernel lives here.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "pagedkv/kernels/element_type.h"

namespace pagedkv::cuda {

// What a status means to a user, where CUDA's own words do not say what to do.
inline std::string cuda_advice(cudaError_t status) {
  if (status != cudaErrorNoKernelImageForDevice && status != cudaErrorInvalidDeviceFunction &&
      status != cudaErrorUnsupportedPtxVersion) {
    return "";
  }
  int device = 0;
  cudaDeviceProp properties{};
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaGetDeviceProperties(&properties, device) != cudaSuccess) {
    return "; this GPU is none of those that pagedkv was built for";
  }
  const std::string arch =
      std::to_string(properties.major) + "." + std::to_string(properties.minor);
  return std::string("; pagedkv was not built for this GPU (") + properties.name +
         ", compute capability " + arch + "): build it with TORCH_CUDA_ARCH_LIST=" + arch +
         (properties.major >= 9 ? "a" : "");
}

inline void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // the exception tells it: the next call of anyone must not find it again
  throw std::runtime_error(std::string("pagedkv: ") + what + ": " + cudaGetErrorString(status) +
                           cuda_advice(status));
}

// After a <<<>>> launch: a bad configuration shows only here.
inline void check_launch(const char* what) { check_cuda(cudaGetLastError(), what); }

inline int current_device() {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

inline int device_attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

inline int num_multiprocessors() {
  return device_attribute(cudaDevAttrMultiProcessorCount, current_device());
}

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
      throw std::runtime_error(std::string("pagedkv: no CUDA kernel for activations of type ") +
                               element_name(type));
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

// Grids have at most 2^31 - 1 blocks along x.
inline unsigned grid_size(int64_t blocks) {
  if (blocks > INT32_MAX) {
    throw std::runtime_error("pagedkv: a grid of " + std::to_string(blocks) +
                             " blocks, at most 2147483647 are possible");
  }
  return static_cast<unsigned>(blocks);
}

constexpr int64_t kMaxBlockDepth = 64;  // threads of a block along z

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace pagedkv::cuda
