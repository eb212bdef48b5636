// What sample_tokens and score_tokens are made of: a first kernel reads all logits once, a second
// one goes on from what that has found, and reads the few chunks that matter.
#pragma once

#include "pagedkv/kernels/cuda_launchers.h"

namespace pagedkv::cuda {

// Into the workspace: (largest, sum) of each chunk. inverse_temperatures: fp32 [n], null if all are
// 1; where it is 0 there is no sum.
void launch_scan_logits(const LogitRows& rows, const float* inverse_temperatures,
                        StreamHandle stream);

}  // namespace pagedkv::cuda
