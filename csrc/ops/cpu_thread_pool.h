// torch's own threads, as the CPU kernels see them.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "pagedkv/kernels/thread_pool.h"

namespace pagedkv::ops {

inline ThreadPool torch_thread_pool() {
  return {.num_threads = static_cast<int64_t>(torch::stable::get_num_threads()),
          .run = [](int64_t begin, int64_t end, int64_t grain, RangeBody body, void* context) {
            STD_TORCH_CHECK(torch_parallel_for(begin, end, grain, body, context) == 0,
                            "pagedkv: torch's parallel_for failed");
          }};
}

}  // namespace pagedkv::ops
