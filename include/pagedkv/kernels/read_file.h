// read_file: bytes of a file to memory of the CPU or of a GPU, by one thread. The launchers
// (csrc/cpu/files, csrc/cuda/files) return when the bytes are there, and throw std::runtime_error
// for a file that cannot be read or ends too early: what was read until then is there.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace pagedkv {

struct ReadFileParams {
  void* target;           // [num_bytes]
  void* staging;          // [staging_bytes] pinned memory of the CPU; null for a target on the CPU
  int64_t num_bytes;      // of the file, from offset on
  int64_t staging_bytes;  // at least 2: its halves are used in turn
  int64_t offset;         // bytes from the file's start
  int fd;                 // open for reading; its position stays
};

// num_bytes of a file from offset on, to memory of the CPU.
inline void read_bytes(int fd, char* memory, int64_t num_bytes, int64_t offset) {
  while (num_bytes > 0) {
    const ssize_t count = ::pread(fd, memory, static_cast<size_t>(num_bytes), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw std::runtime_error(std::string("pagedkv::read_file: ") + strerror(errno));
    if (count == 0) {
      throw std::runtime_error("pagedkv::read_file: it ends before byte " +
                               std::to_string(offset + num_bytes));
    }
    memory += count;
    num_bytes -= count;
    offset += count;
  }
}

namespace cpu {

void launch_read_file(const ReadFileParams& params);

}  // namespace cpu

namespace cuda {

void launch_read_file(const ReadFileParams& params, void* stream);  // a cudaStream_t

}  // namespace cuda

}  // namespace pagedkv
