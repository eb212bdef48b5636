// What every CUDA adapter does around its launch: makes the tensors' device current, and finds the
// caller's current stream on it.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include "pagedkv/kernels/cuda_launchers.h"

namespace pagedkv::ops {

// torch's function for the current stream. It lives in libtorch_cuda, which a CPU-only torch lacks
// and this library therefore does not link; a CUDA torch has loaded it, though not for all to see.
using CurrentStreamFunction = AOTITorchError (*)(int32_t device_index, void** stream);

inline CurrentStreamFunction current_stream_function() {
  static const CurrentStreamFunction function = [] {
    void* torch_cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* symbol =
        torch_cuda == nullptr ? nullptr : dlsym(torch_cuda, "aoti_torch_get_current_cuda_stream");
    return reinterpret_cast<CurrentStreamFunction>(symbol);
  }();
  return function;
}

class CudaContext {
 public:
  explicit CudaContext(const torch::stable::Tensor& tensor)
      : guard_(tensor.get_device_index()), device_index_(tensor.get_device_index()) {
    const CurrentStreamFunction current_stream = current_stream_function();
    STD_TORCH_CHECK(current_stream != nullptr,
                    "pagedkv: this torch has no CUDA; install a torch built for CUDA");
    STD_TORCH_CHECK(current_stream(device_index_, &stream_) == 0,
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
