// CUDA statuses and refusals of launchers, as exceptions.
#include "cuda/device/launch.h"

#include <stdexcept>
#include <string>

namespace pagedkv::cuda {
namespace {

// What a status means to a user, where CUDA's own words do not say what to do.
std::string cuda_advice(cudaError_t status) {
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

}  // namespace

void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // the exception tells it: the next call of anyone must not find it again
  throw std::runtime_error(std::string("pagedkv: ") + what + ": " + cudaGetErrorString(status) +
                           cuda_advice(status));
}

void check_launch(const char* what) { check_cuda(cudaGetLastError(), what); }

int current_device() {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

int device_attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

int num_multiprocessors() {
  return device_attribute(cudaDevAttrMultiProcessorCount, current_device());
}

void refuse_activation_type(ElementType type) {
  throw std::runtime_error(std::string("pagedkv: no CUDA kernel for activations of type ") +
                           element_name(type));
}

unsigned grid_size(int64_t blocks) {
  if (blocks > INT32_MAX) {
    throw std::runtime_error("pagedkv: a grid of " + std::to_string(blocks) +
                             " blocks, at most 2147483647 are possible");
  }
  return static_cast<unsigned>(blocks);
}

}  // namespace pagedkv::cuda
