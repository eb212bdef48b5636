// CUDA adapter of read_file. Unlike a kernel's launch it returns when all is done: a file's errors
// are the caller's to hear of.
#include <torch/csrc/stable/library.h>

#include "ops/cuda_context.h"
#include "ops/file_adapters.h"

namespace pagedkv::ops {
namespace {

void read_file(const Tensor& target, int64_t fd, int64_t offset,
               const std::optional<Tensor>& staging) {
  const OperandChecks check("pagedkv::read_file");
  STD_TORCH_CHECK(target.is_cuda(), "pagedkv::read_file: target is on ", device_name(target),
                  ", expected a cuda device, or no staging there");
  STD_TORCH_CHECK(staging.has_value(),
                  "pagedkv::read_file: staging is missing, expected pinned memory for a target on ",
                  device_name(target));
  check.on_cpu({"staging", staging});
  const ReadFileParams params = read_file_params(target, fd, offset, staging);
  check.at_least("staging_bytes", params.staging_bytes, 2);
  const CudaContext context(target);
  cuda::launch_read_file(params, context.stream());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagedkv, CUDA, library) {
  library.impl("read_file", TORCH_BOX(&read_file));
}

}  // namespace pagedkv::ops
