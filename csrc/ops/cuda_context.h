// What every CUDA adapter does around its launch: makes the tensors' device current, and finds the
// caller's current stream on it.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include "pagedkv/kernels/cuda_launchers.h"

// Lives in libtorch_cuda, which a CPU-only torch lacks. Weak, so that this library loads beside
// any torch; it is null there, and no CUDA tensor can exist to reach the check below.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(
    int32_t device_index, void** stream);

namespace pagedkv::ops {

class CudaContext {
 public:
  explicit CudaContext(const torch::stable::Tensor& tensor)
      : guard_(tensor.get_device_index()), device_index_(tensor.get_device_index()) {
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr,
                    "pagedkv: this torch has no CUDA; install a torch built for CUDA");
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(device_index_, &stream_) == 0,
                    "pagedkv: no current CUDA stream on device ", device_index_);
  }
  CudaContext(const CudaContext&) = delete;
  CudaContext& operator=(const CudaContext&) = delete;

  cuda::StreamHandle stream() const { return stream_; }
  int device_index() const { return device_index_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  int device_index_;
  void* stream_ = nullptr;
};

}  // namespace pagedkv::ops
