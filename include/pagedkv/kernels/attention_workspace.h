// The whole workspace of paged_attention: what attention_params.h lays out, and behind it, where
// there are prefix groups, counters of the workers over them (on a GPU).
#pragma once

#include "pagedkv/kernels/attention_params.h"

namespace pagedkv {

constexpr int64_t kPrefixCounterBytes = 64;  // of a worker

constexpr int64_t whole_workspace_bytes(const PagedAttentionWorkspaceShape& shape) {
  const int64_t bytes = paged_attention_workspace_bytes(shape);
  if (shape.num_prefix_groups == 0) return bytes;
  return bytes + num_prefix_workers(shape.num_workers) * kPrefixCounterBytes;
}

}  // namespace pagedkv
