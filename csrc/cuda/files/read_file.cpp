// read_file to a GPU: pieces of the file are read into one half of pinned memory while the other
// half's copy to the device runs. The disk (or the processor, where the system has the file in
// memory) and the link work at the same time; several threads, each on a stream of its own, keep
// both busy. Every byte moves over the link once: its rate is the floor.
#include "pagedkv/kernels/read_file.h"

#include <algorithm>
#include <stdexcept>

#include "cuda/device/launch.h"

namespace pagedkv::cuda {
namespace {

// When the copies out of the halves have ended. Whatever happens, none reads a half any more once
// this is gone.
class HalvesInUse {
 public:
  explicit HalvesInUse(cudaStream_t stream) : stream_(stream) {
    for (cudaEvent_t& end : ends_) {
      check_cuda(cudaEventCreateWithFlags(&end, cudaEventDisableTiming), "cudaEventCreate");
    }
  }
  HalvesInUse(const HalvesInUse&) = delete;
  HalvesInUse& operator=(const HalvesInUse&) = delete;
  ~HalvesInUse() {
    cudaStreamSynchronize(stream_);
    for (cudaEvent_t end : ends_) cudaEventDestroy(end);
  }

  void wait(int half) { check_cuda(cudaEventSynchronize(ends_[half]), "read_file"); }
  void copy(int half, void* target, const void* source, int64_t num_bytes) {
    check_cuda(cudaMemcpyAsync(target, source, static_cast<size_t>(num_bytes),
                               cudaMemcpyHostToDevice, stream_),
               "read_file: cudaMemcpyAsync");
    check_cuda(cudaEventRecord(ends_[half], stream_), "cudaEventRecord");
  }

 private:
  cudaStream_t stream_;
  cudaEvent_t ends_[2] = {};
};

}  // namespace

void launch_read_file(const ReadFileParams& p, void* stream) {
  cudaPointerAttributes attributes{};
  check_cuda(cudaPointerGetAttributes(&attributes, p.staging), "cudaPointerGetAttributes");
  if (attributes.type != cudaMemoryTypeHost) {
    throw std::runtime_error("pagedkv::read_file: staging is in memory that is not pinned");
  }
  if (p.num_bytes == 0) return;
  const int64_t half_bytes = p.staging_bytes / 2;
  HalvesInUse halves(static_cast<cudaStream_t>(stream));
  int half = 0;
  for (int64_t begin = 0; begin < p.num_bytes; begin += half_bytes) {
    const int64_t count = std::min(half_bytes, p.num_bytes - begin);
    char* piece = static_cast<char*>(p.staging) + half * half_bytes;
    halves.wait(half);
    read_bytes(p.fd, piece, count, p.offset + begin);
    halves.copy(half, static_cast<char*>(p.target) + begin, piece, count);
    half = 1 - half;
  }
  for (const int last : {0, 1}) halves.wait(last);
}

}  // namespace pagedkv::cuda
