// The block manager in a C++ engine: two requests share a prompt, one writes and copies, one step's
// tables are written. Prints each block table as it changes.

#include <iostream>
#include <vector>

#include "pagedkv/core/block_manager.h"
#include "pagedkv/core/step_tables.h"

namespace {

void show(const pagedkv::BlockManager& manager, pagedkv::SeqId id) {
  std::cout << "sequence " << id << ": " << manager.sequence(id).num_tokens << " tokens in blocks";
  for (const pagedkv::BlockId block : manager.sequence(id).table) {
    std::cout << ' ' << block << " (ref count " << manager.ref_count(block) << ")";
  }
  std::cout << '\n';
}

}  // namespace

int main() {
  using namespace pagedkv;
  BlockManager manager({.num_blocks = 8, .block_size = 4});
  const std::vector<TokenId> prompt = {11, 12, 13, 14, 15, 16};

  if (manager.can_allocate(prompt) != CanAllocate::kOk) return 1;
  manager.allocate(0, prompt);
  manager.fork(0, 1);
  std::cout << "after fork\n";
  show(manager, 0);
  show(manager, 1);

  // Both decode one token. The first to write the shared last block gets a copy of it; the engine
  // runs the copies before the step's kernels.
  const std::vector<SeqId> ids = {0, 1};
  const std::vector<std::int64_t> one_each = {1, 1};
  for (const BlockCopy& copy : manager.append_batch(ids, one_each)) {
    std::cout << "copy block " << copy.source << " to block " << copy.destination << '\n';
  }
  show(manager, 0);
  show(manager, 1);

  StepTables tables(manager, /*max_num_slots=*/2, /*max_num_blocks=*/8);
  std::vector<BlockId> block_tables(2 * 8);
  std::vector<std::int64_t> slot_mapping(2), positions(2);
  std::vector<std::int32_t> seq_lens(2), query_start_loc(3);
  const std::vector<std::int64_t> slots = {0, 1};
  tables.write(ids, one_each, slots,
               {.block_tables = block_tables.data(),
                .num_block_table_rows = 2,
                .block_table_stride = 8,
                .slot_mapping = slot_mapping,
                .positions = positions,
                .seq_lens = seq_lens,
                .query_start_loc = query_start_loc},
               /*only_changed=*/false);
  std::cout << "the step writes slots " << slot_mapping[0] << " and " << slot_mapping[1] << '\n';

  manager.publish(0, {},
                  6);  // the step has run: the first block of the prompt can be found from now on
  manager.free_batch(ids);
  std::cout << manager.match(prompt) << " tokens of the same prompt would be cached\n";
  manager.check_invariants();
}
