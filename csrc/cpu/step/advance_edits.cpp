// advance_edits on the CPU, entry by entry.
#include "pagedkv/kernels/step_launchers.h"

namespace pagedkv::cpu {

void launch_advance_edits(const AdvanceEditsParams& p) {
  for (int64_t r = 0; r < p.num_rows; ++r) {
    const EditRow& row = p.rows[r];
    const auto token = row.slot < 0 ? -1 : static_cast<int32_t>(p.latest[row.slot]);
    bool is_listed = false;
    for (int32_t i = 0; i < row.source_len; ++i) is_listed |= edit_before(p, row, i).id == token;
    const bool is_new = token >= 0 && !is_listed && p.is_limited[r] == 0;
    const int64_t begin = p.start_loc[r];
    for (int64_t i = 0; begin + i < p.start_loc[r + 1]; ++i) {
      write_edit(p, row, begin + i, edit_after(p, row, i, token, is_new));
    }
  }
}

}  // namespace pagedkv::cpu
