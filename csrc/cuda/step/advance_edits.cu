// advance_edits: the edits of one step from those of the step before, and the tokens chosen since.
//
// Grid: one block for one row; each thread looks for the row's token in some entries of its list,
// then writes some of the next list. Must move 12 bytes of each entry in, most of them once more
// from a cache, and 20 bytes out. No instantiations.
#include "cuda/device/launch.h"
#include "pagedkv/kernels/step_launchers.h"

namespace pagedkv::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    advance_edits_kernel(const __grid_constant__ AdvanceEditsParams p) {
  const int64_t begin = p.start_loc[blockIdx.x];
  const int64_t size = p.start_loc[blockIdx.x + 1] - begin;
  if (size == 0) return;
  const EditRow row = p.rows[blockIdx.x];
  const auto thread = static_cast<int64_t>(threadIdx.x);
  const int32_t token = row.slot < 0 ? -1 : static_cast<int32_t>(p.latest[row.slot]);
  bool is_mine = false;
  if (token >= 0) {
    for (int64_t i = thread; i < row.source_len; i += kThreads) {
      is_mine |= edit_before(p, row, i).id == token;
    }
  }
  const bool is_listed = __syncthreads_or(static_cast<int>(is_mine)) != 0;
  const bool is_new = token >= 0 && !is_listed && p.is_limited[blockIdx.x] == 0;
  for (int64_t i = thread; i < size; i += kThreads) {
    write_edit(p, row, begin + i, edit_after(p, row, i, token, is_new));
  }
}

}  // namespace

void launch_advance_edits(const AdvanceEditsParams& params, void* stream) {
  if (params.num_rows == 0) return;
  advance_edits_kernel<<<grid_size(params.num_rows), kThreads, 0,
                         static_cast<cudaStream_t>(stream)>>>(params);
  check_launch("advance_edits");
}

}  // namespace pagedkv::cuda
