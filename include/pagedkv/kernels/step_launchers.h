// Launchers of the kernels that prepare a step (csrc/cpu/step, csrc/cuda/step); they keep the rules
// of cpu_launchers.h and cuda_launchers.h.
#pragma once

#include "pagedkv/kernels/edit_params.h"
#include "pagedkv/kernels/step_params.h"

namespace pagedkv::cpu {

// One thread: the inputs of a step are a few numbers a row.
void launch_advance_step(const AdvanceStepParams& params);

// One thread too: lists have some hundreds of entries.
void launch_advance_edits(const AdvanceEditsParams& params);

}  // namespace pagedkv::cpu

namespace pagedkv::cuda {

void launch_advance_step(const AdvanceStepParams& params, void* stream);  // a cudaStream_t

void launch_advance_edits(const AdvanceEditsParams& params, void* stream);  // a cudaStream_t

}  // namespace pagedkv::cuda
