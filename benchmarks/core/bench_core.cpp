// The core's own cost, without Python: allocate, append, publish and free per block, at a given
// pool size, in shuffled order. Prints "name <tab> value <tab> unit" lines for
// bench_block_manager.py.
//
// One round fills the whole pool: sequences of kSeqBlocks blocks, half of them by allocate (the
// prompt), half by append (one block a sequence a call), then frees all in random order. Rounds
// after the first find a pool that is shuffled, and with prefix caching full of idle cached blocks,
// so every block taken is an eviction. The best round counts, since what else the machine does only
// adds.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "pagedkv/core/block_manager.h"

namespace {

using namespace pagedkv;

constexpr std::int64_t kBlockSize = 16;
constexpr std::int64_t kSeqBlocks = 256;
constexpr int kNumRounds = 7;

double now_us() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::micro>(since).count();
}

struct Costs {  // us per block
  std::vector<double> allocate, append, publish, free;
};

// Prompts that no earlier round had, so that nothing hits; drawn outside the timed parts.
std::vector<TokenId> draw_tokens(std::mt19937& random, std::int64_t num_tokens) {
  std::vector<TokenId> tokens(static_cast<std::size_t>(num_tokens));
  for (TokenId& token : tokens) token = static_cast<TokenId>(random() % 128000);
  return tokens;
}

void run_round(BlockManager& manager, bool is_cached, std::mt19937& random, Costs& costs) {
  const std::int64_t num_seqs = manager.num_blocks() / kSeqBlocks;
  constexpr std::int64_t kHalf = kSeqBlocks / 2;
  constexpr std::int64_t kPromptLen = kHalf * kBlockSize;
  const std::vector<TokenId> prompts = draw_tokens(random, num_seqs * kPromptLen);
  const std::vector<TokenId> outputs = draw_tokens(random, num_seqs * kPromptLen);
  std::vector<SeqId> ids(static_cast<std::size_t>(num_seqs));
  std::iota(ids.begin(), ids.end(), 0);
  const auto num_blocks_each = static_cast<double>(num_seqs * kHalf);

  double start = now_us();
  for (const SeqId id : ids) manager.allocate(id, {prompts.data() + id * kPromptLen, kPromptLen});
  costs.allocate.push_back((now_us() - start) / num_blocks_each);

  const std::vector<std::int64_t> counts(ids.size(), kBlockSize);
  start = now_us();
  for (std::int64_t i = 0; i < kHalf; ++i) manager.append_batch(ids, counts);
  costs.append.push_back((now_us() - start) / num_blocks_each);

  if (is_cached) {
    start = now_us();
    for (const SeqId id : ids) {
      manager.publish(id, {outputs.data() + id * kPromptLen, kPromptLen}, kSeqBlocks * kBlockSize);
    }
    costs.publish.push_back((now_us() - start) / (2 * num_blocks_each));
  }

  std::shuffle(ids.begin(), ids.end(), random);
  start = now_us();
  for (const SeqId id : ids) manager.free(id);
  costs.free.push_back((now_us() - start) / (2 * num_blocks_each));
}

void report(const std::string& name, std::vector<double> values, std::size_t num_skipped = 1) {
  values.erase(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(num_skipped));
  std::printf("%s\t%.4f\tus/block\n", name.c_str(),
              *std::min_element(values.begin(), values.end()));
}

void bench_cycle(std::int64_t num_blocks, bool is_cached) {
  BlockManager manager({.num_blocks = num_blocks,
                        .block_size = kBlockSize,
                        .enable_prefix_caching = is_cached,
                        .shuffle_seed = 1});
  std::mt19937 random(2);
  Costs costs;
  for (int i = 0; i < kNumRounds; ++i) run_round(manager, is_cached, random, costs);
  const std::string name = is_cached ? "prefix_" : "plain_";
  report(name + "allocate", costs.allocate);
  report(name + "append", costs.append);
  if (is_cached) report(name + "publish", costs.publish);
  report(name + "free", costs.free);
  if (is_cached && manager.statistics().num_evictions == 0)
    std::abort();  // measured the wrong thing
}

// Latency of one access to memory that no cache holds: a walk along one random cycle through 256
// MiB.
void bench_memory_latency() {
  constexpr std::size_t kNumLines = std::size_t{1} << 22;
  struct alignas(64) Line {
    std::size_t next;
  };
  HugeVector<Line> lines(kNumLines);
  std::vector<std::size_t> order(kNumLines);
  std::iota(order.begin(), order.end(), 0);
  std::mt19937_64 random(5);
  std::shuffle(order.begin(), order.end(), random);
  for (std::size_t i = 0; i < kNumLines; ++i) lines[order[i]].next = order[(i + 1) % kNumLines];
  constexpr int kNumSteps = 2'000'000;
  std::size_t at = 0;
  const double start = now_us();
  for (int i = 0; i < kNumSteps; ++i) at = lines[at].next;
  const double took = now_us() - start;
  std::printf("memory_latency\t%.4f\tus\n", took / kNumSteps + static_cast<double>(at % 2) * 1e-9);
}

}  // namespace

int main(int num_arguments, char** arguments) {
  std::int64_t num_blocks = 1'000'000;
  if (num_arguments == 3 && std::strcmp(arguments[1], "--num-blocks") == 0) {
    num_blocks = std::atoll(arguments[2]);
  } else if (num_arguments != 1) {
    std::fprintf(stderr, "usage: %s [--num-blocks N]\n", arguments[0]);
    return 2;
  }
  bench_cycle(num_blocks, false);
  bench_cycle(num_blocks, true);
  bench_memory_latency();
}
