// Cuts a batch into tasks. The cut of a sequence depends on that sequence, its prefix group and the
// options alone, never on its neighbours or on the number of threads, wherever that could change
// the rounding of a result.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/attention/task.h"

namespace pagedkv::cpu {

struct AttentionPlan {
  std::vector<AttentionTask> tasks;  // the largest first
  std::vector<MergeTask> merges;
  int64_t num_states;
  int64_t max_rows;  // of a task
  bool packs;        // some task is not streaming
};

AttentionPlan plan_attention(const PagedAttentionParams& params, int64_t num_threads);

}  // namespace pagedkv::cpu
