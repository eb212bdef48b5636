// read_file on the CPU: the system copies from its pages, or the disk, to where bytes are to be.
#include "pagedkv/kernels/read_file.h"

namespace pagedkv::cpu {

void launch_read_file(const ReadFileParams& p) {
  read_bytes(p.fd, static_cast<char*>(p.target), p.num_bytes, p.offset);
}

}  // namespace pagedkv::cpu
