// Fuzzer: bytes become operations of an engine on a manager, over the cache model. After each
// operation every invariant holds, every sequence reads its own content, a refused call changed
// nothing, and no block that a launched step may touch is handed out. Steps overlap as in a
// pipelined engine: the next is scheduled and written before the last is updated.
//
// With Clang it is a libFuzzer target; elsewhere draw_inputs.cpp draws the inputs.

#include <algorithm>
#include <deque>
#include <map>
#include <set>

#include "../cache_model.h"
#include "../manager_state.h"
#include "bytes.h"

namespace pagedkv::testing {
namespace {

[[noreturn]] void fail(const std::string& what) { throw std::logic_error(what); }

class Engine {
 public:
  explicit Engine(Bytes& bytes)
      : bytes_(bytes),
        config_(draw_config()),
        manager_(config_),
        cache_(config_.num_blocks, config_.num_cpu_blocks, config_.block_size),
        tables_(manager_, 64, 256),
        window_(bytes_.below(2) == 0 ? 0 : 1 + bytes_.below(14)) {}

  void run() {
    for (int i = 0; i < 200 && !bytes_.is_empty(); ++i) {
      operate();
      check();
    }
    while (!steps_.empty()) update();
    run_moves();
    manager_.end_step(manager_.begin_step());
    for (const auto& [id, live] : live_) manager_.free(id);
    manager_.check_invariants();
    const Statistics s = manager_.statistics();
    if (s.num_free + s.num_cached_idle != s.num_blocks ||
        s.num_cpu_free + s.num_cpu_cached_idle != s.num_cpu_blocks || s.num_tokens != 0) {
      fail("blocks are lost at the end: " + state_of(manager_));
    }
    manager_.reset_prefix_cache();
    if (manager_.statistics().num_free != s.num_blocks ||
        manager_.statistics().num_cpu_free != s.num_cpu_blocks)
      fail("a reset leaves blocks that are not free");
  }

 private:
  struct Live {
    std::vector<TokenId>
        tokens;  // all that will ever be held; the manager learns generated ones at an update
    std::string extra_key;
    std::int64_t prompt_len = 0;
    std::int64_t num_written = 0;  // positions whose content a launched step has written
    std::int64_t num_told = 0;     // ids that the manager knows
  };
  struct Step {
    StepId id = 0;
    std::map<SeqId, std::int64_t> num_computed;
    std::set<BlockId> touched;
  };

  BlockManagerConfig draw_config() {
    constexpr std::int64_t kBits[] = {128, 4, 1};
    BlockManagerConfig config{.num_blocks = 4 + bytes_.below(28),
                              .block_size = 1 + bytes_.below(5),
                              .num_cpu_blocks = bytes_.below(3) * 6,
                              .watermark = 0.1 * static_cast<double>(bytes_.below(3)),
                              .enable_prefix_caching = bytes_.below(8) != 0,
                              .hash_secret = "the fuzzer's secret",
                              .hash_bits = kBits[bytes_.below(3)],
                              .shuffle_seed = static_cast<std::uint64_t>(bytes_.below(256))};
    config.enable_kv_offloading =
        config.num_cpu_blocks > 0 && config.enable_prefix_caching && bytes_.below(3) != 0;
    return config;
  }

  // The moves of the calls so far, together: those out of the pool first.
  void run_moves() {
    const Moves moves = manager_.take_moves();
    std::set<BlockId> cpu_blocks, arrived;
    for (const BlockCopy& move : moves.out) {
      if (!cpu_blocks.insert(move.destination).second) fail("two moves into one CPU block");
    }
    for (const BlockCopy& move : moves.in) {
      if (!arrived.insert(move.destination).second) fail("two moves into one block");
    }
    cache_.swap_out(moves.out);
    cache_.swap_in(moves.in);
  }

  // Runs call; if it is refused, nothing may have changed.
  template <class Call>
  bool attempt(Call call) {
    const std::string before = state_of(manager_);
    try {
      call();
      return true;
    } catch (const OutOfBlocks&) {
    } catch (const std::invalid_argument&) {
    } catch (const UnknownSequence&) {
    } catch (const DoubleFree&) {
    }
    if (state_of(manager_) != before) fail("a refused call changed the manager");
    return false;
  }

  SeqId draw_id() { return bytes_.below(12); }
  std::vector<SeqId> draw_ids() {
    std::vector<SeqId> ids;
    for (std::int64_t i = bytes_.below(3); i >= 0; --i) ids.push_back(draw_id());
    return ids;
  }

  void operate() {
    switch (bytes_.below(12)) {
      case 0:
      case 1:
        return start();
      case 2:
      case 3:
      case 4:
        return launch();
      case 5:
      case 6:
        return update();
      case 7:
        return fork();
      case 8:
        return free();
      case 9:
        return swap_out();
      case 10:
        return swap_in();
      default:
        if (bytes_.below(8) == 0) manager_.reset_prefix_cache();
        for (const SeqId id : draw_ids()) free_behind(id);
    }
  }

  void start() {
    const SeqId id = draw_id();
    Live live;
    // Few different prompts, of which many share a prefix.
    const std::int64_t len = 1 + bytes_.below(24);
    const auto split = bytes_.below(24);
    const auto kind = static_cast<TokenId>(bytes_.below(3));
    for (std::int64_t i = 0; i < len; ++i)
      live.tokens.push_back(static_cast<TokenId>(i < split ? i : 100 + kind));
    live.extra_key = std::string(static_cast<std::size_t>(bytes_.below(2)), 'k');
    live.prompt_len = live.num_told = len;
    const std::int64_t chunk = bytes_.below(16);
    const CanAllocate answer =
        manager_.can_allocate(live.tokens, chunk, 0, live.extra_key, window_);
    const std::int64_t num_matched = manager_.match(live.tokens, live.extra_key);
    std::int64_t num_cached = 0;
    const bool has_started = attempt(
        [&] { num_cached = manager_.allocate(id, live.tokens, chunk, live.extra_key, window_); });
    if (!has_started) {
      if (live_.count(id) == 0 && answer == CanAllocate::kOk)
        fail("can_allocate said OK and allocate refused");
      return;
    }
    if (num_cached != num_matched || num_cached >= len)
      fail("allocate does not take what match finds");
    live.num_written = num_cached;
    live_[id] = live;
    check_fresh(id, num_cached);
    check_window(id);
  }

  // Positions that the next step reads have their blocks.
  std::int64_t first_needed(SeqId id) const {
    return std::max<std::int64_t>(live_.at(id).num_written - window_ + 1, 0);
  }
  void check_window(SeqId id) const {
    if (window_ > 0 && manager_.sequence(id).num_freed * config_.block_size > first_needed(id)) {
      fail("a block was given back that the window needs");
    }
  }
  void free_behind(SeqId id) {
    if (window_ == 0) return;
    const std::int64_t first = live_.count(id) > 0 ? first_needed(id) : 0;
    attempt([&] { manager_.free_behind(id, first); });
    if (live_.count(id) > 0) check_window(id);
  }

  // Blocks taken for positions from first on are none that a launched step may touch.
  void check_fresh(SeqId id, std::int64_t first) {
    const Sequence& sequence = manager_.sequence(id);
    const std::int64_t block_size = config_.block_size;
    for (auto i = static_cast<std::size_t>((first + block_size - 1) / block_size);
         i < sequence.table.size(); ++i) {
      for (const Step& step : steps_) {
        if (step.touched.count(sequence.table[i]) > 0) {
          fail("block " + std::to_string(sequence.table[i]) +
               " was taken while a launched step may touch it");
        }
      }
    }
  }

  void launch() {
    if (static_cast<std::int64_t>(steps_.size()) == 3) return;
    std::vector<SeqId> ids = draw_ids();
    std::vector<std::int64_t> counts;
    for (const SeqId id : ids) {
      const auto live = live_.find(id);
      std::int64_t count = bytes_.below(6);
      if (live != live_.end()) {  // the rest of the prompt comes in chunks, then one token a step
        const std::int64_t num_held = manager_.sequence(id).num_tokens;
        count = num_held < live->second.prompt_len
                    ? std::min(count, live->second.prompt_len - num_held)
                    : 1;
      }
      counts.push_back(count);
    }
    std::map<SeqId, std::int64_t> num_held;
    for (const auto& [id, live] : live_) num_held[id] = manager_.sequence(id).num_tokens;
    std::vector<BlockCopy> copies;
    std::int64_t num_needed = -1;
    if (!attempt([&] { num_needed = manager_.num_blocks_needed(ids, counts); })) num_needed = -1;
    const bool must_work = num_needed >= 0 && num_needed <= manager_.num_allocatable_blocks();
    if (attempt([&] { copies = manager_.append_batch(ids, counts); }) != must_work) {
      fail("append_batch and num_blocks_needed disagree");
    }
    if (!must_work) return;
    run_moves();
    cache_.copy(copies);
    std::vector<std::int64_t> query_lens, slots;
    std::int64_t num_tokens = 0;
    for (const SeqId id : ids) {
      Live& live = live_.at(id);
      const std::int64_t now = manager_.sequence(id).num_tokens;
      check_fresh(id, num_held.at(id));
      while (static_cast<std::int64_t>(live.tokens.size()) < now) {
        live.tokens.push_back(static_cast<TokenId>(bytes_.below(2)));
      }
      query_lens.push_back(now - live.num_written);
      slots.push_back(id);
      num_tokens += query_lens.back();
    }
    write_step(ids, query_lens, slots, num_tokens);
  }

  void write_step(const std::vector<SeqId>& ids, const std::vector<std::int64_t>& query_lens,
                  const std::vector<std::int64_t>& slots, std::int64_t num_tokens) {
    buffers_.slot_mapping.assign(static_cast<std::size_t>(num_tokens), kPoison);
    buffers_.positions.assign(static_cast<std::size_t>(num_tokens), kPoison);
    tables_.write(ids, query_lens, slots, buffers_.view(), true);
    Step step;
    std::size_t next = 0;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      Live& live = live_.at(ids[i]);
      const std::vector<BlockId> row = buffers_.row(slots[i]);
      const std::vector<BlockId>& table = manager_.sequence(ids[i]).table;
      const std::int32_t num_freed = manager_.sequence(ids[i]).num_freed;
      if (!std::equal(table.begin() + num_freed, table.end(), row.begin() + num_freed))
        fail("only_changed left a stale block table");
      const std::vector<Tag> tags = tags_of(live.tokens, live.extra_key);
      for (std::int64_t j = 0; j < query_lens[i]; ++j, ++next) {
        cache_.write(buffers_.slot_mapping[next],
                     tags.at(static_cast<std::size_t>(buffers_.positions[next])));
      }
      live.num_written += query_lens[i];
      step.num_computed[ids[i]] = live.num_written;
      step.touched.insert(table.begin() + num_freed, table.end());
    }
    step.id = manager_.begin_step();
    steps_.push_back(step);
  }

  // The oldest step has ended: its tokens are known and its blocks findable.
  void update() {
    if (steps_.empty()) return;
    const Step step = steps_.front();
    steps_.pop_front();
    const bool has_failed = bytes_.below(16) == 0;
    manager_.end_step(step.id, has_failed);
    if (has_failed) return end_all_of(step);
    std::vector<SeqId> ids;
    std::vector<TokenId> told;
    std::vector<std::int64_t> counts, num_computed;
    for (const auto& [id, computed] : step.num_computed) {
      const auto found = live_.find(id);
      if (found == live_.end() || found->second.num_written < computed)
        continue;  // aborted; perhaps its id lives again
      Live& live = found->second;
      const std::int64_t count = std::max<std::int64_t>(computed - live.num_told, 0);
      ids.push_back(id);
      told.insert(told.end(), live.tokens.begin() + live.num_told,
                  live.tokens.begin() + live.num_told + count);
      counts.push_back(count);
      num_computed.push_back(computed);
      live.num_told += count;
    }
    manager_.publish_batch(ids, told, counts, num_computed);
    for (const SeqId id : ids) free_behind(id);
  }

  // Its sequences end with it.
  void end_all_of(const Step& step) {
    for (const auto& [id, computed] : step.num_computed) {
      const auto found = live_.find(id);
      if (found == live_.end() || found->second.num_written < computed) continue;
      manager_.free(id);
      live_.erase(found);
      for (Step& other : steps_) other.num_computed.erase(id);
    }
  }

  void fork() {
    const SeqId parent = draw_id();
    const SeqId child = draw_id();
    // What is held and not yet in a step would be written by both.
    const auto live = live_.find(parent);
    if (live != live_.end() && live->second.num_written < manager_.sequence(parent).num_tokens)
      return;
    if (attempt([&] { manager_.fork(parent, child); })) live_[child] = live_.at(parent);
  }

  void free() {
    const std::vector<SeqId> ids = draw_ids();
    if (!attempt([&] { manager_.free_batch(ids); })) return;
    for (const SeqId id : ids) {
      live_.erase(id);
      for (Step& step : steps_) step.num_computed.erase(id);
    }
  }

  void swap_out() {
    const std::vector<SeqId> ids = draw_ids();
    std::int64_t num_planned = -1;
    attempt([&] { num_planned = manager_.num_swap_out_blocks(ids); });
    std::vector<BlockCopy> pairs;
    if (!attempt([&] { pairs = manager_.swap_out(ids); })) return;
    if (static_cast<std::int64_t>(pairs.size()) != num_planned)
      fail("num_swap_out_blocks is not what swap_out moves");
    cache_.swap_out(pairs);
  }

  void swap_in() {
    const std::vector<SeqId> ids = draw_ids();
    std::int64_t num_planned = -1;
    attempt([&] { num_planned = manager_.num_swap_in_blocks(ids); });
    std::vector<BlockCopy> pairs;
    if (!attempt([&] { pairs = manager_.swap_in(ids); })) return;
    if (static_cast<std::int64_t>(pairs.size()) != num_planned)
      fail("num_swap_in_blocks is not what swap_in takes");
    run_moves();
    cache_.swap_in(pairs);
  }

  void check() {
    manager_.check_invariants();
    if (static_cast<std::int64_t>(live_.size()) != manager_.statistics().num_sequences)
      fail("sequences are lost");
    if (bytes_.below(2) == 0) run_moves();
    if (!TestAccess::moves(manager_).in.empty()) return;  // what they bring is not there yet
    for (const auto& [id, live] : live_) {
      cache_.verify(manager_, id, tags_of(live.tokens, live.extra_key), live.num_written);
    }
  }

  Bytes& bytes_;
  BlockManagerConfig config_;
  BlockManager manager_;
  CacheModel cache_;
  StepTables tables_;
  const std::int64_t window_;  // 0: none
  PoisonedBuffers buffers_{12, 256, 0, 12};
  std::map<SeqId, Live> live_;
  std::deque<Step> steps_;
};

}  // namespace
}  // namespace pagedkv::testing

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  pagedkv::testing::Bytes bytes(data, size);
  pagedkv::testing::Engine(bytes).run();
  return 0;
}
