// What every CUDA adapter does around its launch: makes the tensors' device current, finds the
// caller's current stream on it, and takes memory there.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <exception>

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

// Memory of a call on the tensor's device. The caching allocator hands freed memory only to later
// work of the same stream, so the tensor may go when the kernels are enqueued. An error of the
// stable interface does not tell what it was; that it is the memory, the engine must know.
inline torch::stable::Tensor call_workspace(const torch::stable::Tensor& like, int64_t bytes) {
  try {
    return torch::stable::new_empty(like, {bytes}, torch::headeronly::ScalarType::Byte);
  } catch (const std::exception&) {
    STD_TORCH_CHECK(false, "pagedkv: CUDA out of memory: no ", bytes, " bytes for a workspace");
  }
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
