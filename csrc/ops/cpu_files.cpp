// CPU adapter of read_file.
#include <torch/csrc/stable/library.h>

#include "ops/file_adapters.h"

namespace pagedkv::ops {
namespace {

void read_file(const Tensor& target, int64_t fd, int64_t offset,
               const std::optional<Tensor>& staging) {
  STD_TORCH_CHECK(!staging.has_value(),
                  "pagedkv::read_file: staging is given, expected none for a target on the CPU");
  cpu::launch_read_file(read_file_params(target, fd, offset, staging));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagedkv, CPU, library) {
  library.impl("read_file", TORCH_BOX(&read_file));
}

}  // namespace pagedkv::ops
