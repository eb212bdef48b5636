// The two kernels of sample_tokens, one file each: the first reads all logits once, the second
// chooses from what that has found and the few chunks that matter.
#pragma once

#include "pagedkv/kernels/cuda_launchers.h"

namespace pagedkv::cuda {

// Whether rows are read by 16 bytes.
bool has_wide_rows(const SampleTokensParams& params);

void launch_scan_logits(const SampleTokensParams& params, StreamHandle stream);
void launch_pick_tokens(const SampleTokensParams& params, StreamHandle stream);

}  // namespace pagedkv::cuda
