// A launch that overlaps the end of the kernel before it on the stream (programmatic dependent
// launch): its blocks start as multiprocessors come free and wait inside. Worth about half a
// microsecond between two short kernels that both take part; kernels that do not, torch's among
// them, still run alone. For .cu files only: it asks nvcc which architectures are being built.
#pragma once

#include <type_traits>

#include "cuda/device/launch.h"
#include "cuda/device/mma.cuh"

namespace pagedkv::cuda {

// First in the kernel, in every thread, before memory is touched: until it returns the kernel
// before may still be running. Lets the next kernel start as soon as all blocks of this one have.
__device__ inline void begin_overlapped_kernel() {
  wait_previous_kernel();
  allow_next_kernel();
}

// Whether the code that this device runs has the wait inside. Code compiled for an older
// architecture runs on newer devices too, and has not.
inline bool kernels_wait_inside(int device) {
  constexpr int kBuilt[] = {__CUDA_ARCH_LIST__};
  const int arch = 100 * device_attribute(cudaDevAttrComputeCapabilityMajor, device) +
                   10 * device_attribute(cudaDevAttrComputeCapabilityMinor, device);
  for (const int built : kBuilt) {
    if (built == arch) return arch >= 900;
  }
  return false;
}

// Launches a kernel that waits inside: begins with begin_overlapped_kernel(), or knows better when.
template <class... Params>
void launch_overlapped(const char* op, void (*kernel)(Params...), dim3 grid, dim3 block,
                       int shared_bytes, cudaStream_t stream,
                       const std::type_identity_t<Params>&... params) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = kernels_wait_inside(current_device()) ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, params...), op);
}

template <class... Params>
void launch_overlapped(const char* op, void (*kernel)(Params...), dim3 grid, dim3 block,
                       cudaStream_t stream, const std::type_identity_t<Params>&... params) {
  launch_overlapped(op, kernel, grid, block, 0, stream, params...);
}

}  // namespace pagedkv::cuda
