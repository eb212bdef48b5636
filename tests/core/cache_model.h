// CacheModel: a KV cache whose "K/V" is a tag per position, so that reading a wrong block is seen.
// A token's tag depends on every token before it and on the extra key, as its K/V does. Copies,
// swaps and steps run on it as an engine would run them on the device; what a sequence then reads
// must be the tags of its own tokens.

#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "pagedkv/core/block_manager.h"
#include "step_buffers.h"

namespace pagedkv::testing {

using Tag = std::uint64_t;

inline Tag mix(Tag state, Tag value) {
  state = (state ^ value) * 0x9e3779b97f4a7c15ULL;
  return state ^ (state >> 29);
}

// Tags of all positions of a sequence.
inline std::vector<Tag> tags_of(std::span<const TokenId> tokens, std::string_view extra_key) {
  Tag state = 1;
  for (const char c : extra_key) state = mix(state, static_cast<unsigned char>(c));
  std::vector<Tag> tags;
  for (const TokenId token : tokens) tags.push_back(state = mix(state, static_cast<Tag>(token)));
  return tags;
}

class CacheModel {
 public:
  CacheModel(std::int64_t num_blocks, std::int64_t num_cpu_blocks, std::int64_t block_size)
      : block_size_(block_size),
        pool_(static_cast<std::size_t>(num_blocks * block_size)),
        cpu_(static_cast<std::size_t>(num_cpu_blocks * block_size)) {}

  void copy(const std::vector<BlockCopy>& pairs) { move(pool_, pool_, pairs); }
  void swap_out(const std::vector<BlockCopy>& pairs) { move(pool_, cpu_, pairs); }
  void swap_in(const std::vector<BlockCopy>& pairs) { move(cpu_, pool_, pairs); }
  void write(std::int64_t slot, Tag tag) { pool_.at(static_cast<std::size_t>(slot)) = tag; }
  Tag read(std::int64_t slot) const { return pool_.at(static_cast<std::size_t>(slot)); }

  // Throws if position i < num_computed of the sequence does not hold tags[i]; what was given back
  // behind a window is not looked at.
  void verify(const BlockManager& manager, SeqId id, std::span<const Tag> tags,
              std::int64_t num_computed) const {
    const Sequence& sequence = manager.sequence(id);
    for (std::int64_t i = sequence.num_freed * block_size_; i < num_computed; ++i) {
      const BlockId block = sequence.table.at(static_cast<std::size_t>(i / block_size_));
      const std::vector<Tag>& memory = block >= 0 ? pool_ : cpu_;
      const std::int64_t at = (block >= 0 ? block : -1 - block) * block_size_ + i % block_size_;
      if (memory.at(static_cast<std::size_t>(at)) != tags[static_cast<std::size_t>(i)]) {
        throw std::logic_error("seq_id " + std::to_string(id) +
                               " reads foreign content at position " + std::to_string(i) +
                               ", table entry " + std::to_string(block));
      }
    }
  }

 private:
  void move(const std::vector<Tag>& from, std::vector<Tag>& to,
            const std::vector<BlockCopy>& pairs) {
    for (const BlockCopy& pair : pairs) {
      for (std::int64_t i = 0; i < block_size_; ++i) {
        to.at(static_cast<std::size_t>(pair.destination * block_size_ + i)) =
            from.at(static_cast<std::size_t>(pair.source * block_size_ + i));
      }
    }
  }

  std::int64_t block_size_;
  std::vector<Tag> pool_;
  std::vector<Tag> cpu_;
};

// A manager, its cache and the tokens of its sequences: runs steps and verifies everything read.
class ModelEngine {
 public:
  explicit ModelEngine(const BlockManagerConfig& config)
      : manager(config),
        cache(config.num_blocks, config.num_cpu_blocks, config.block_size),
        has_offloading(config.enable_kv_offloading) {}

  struct Request {
    SeqId id = 0;
    std::vector<TokenId> tokens;  // all known ids
    std::string extra_key;
    std::int64_t num_computed = 0;
    std::int64_t window = 0;  // 0: it sees all its tokens
  };

  Request start(SeqId id, std::vector<TokenId> prompt, std::string extra_key = {},
                std::optional<std::int64_t> max_new_tokens = std::nullopt,
                std::int64_t window = 0) {
    Request request{
        .id = id, .tokens = std::move(prompt), .extra_key = std::move(extra_key), .window = window};
    request.num_computed =
        manager.allocate(id, request.tokens, max_new_tokens, request.extra_key, window);
    manager.check_invariants();
    run_moves();
    verify(request);
    return request;
  }
  void run_moves() {
    const Moves moves = manager.take_moves();
    cache.swap_out(moves.out);
    cache.swap_in(moves.in);
  }
  // One step of one request: everything it holds and has not computed.
  void compute(Request& request) {
    const std::int64_t num_tokens = manager.sequence(request.id).num_tokens;
    const std::int64_t query_len = num_tokens - request.num_computed;
    const auto num_entries = static_cast<std::int64_t>(manager.sequence(request.id).table.size());
    StepTables tables(manager, 1, num_entries);
    PoisonedBuffers buffers(1, num_entries, static_cast<std::size_t>(query_len), 1);
    const std::int64_t slot = 0;
    tables.write({&request.id, 1}, {&query_len, 1}, {&slot, 1}, buffers.view(), false);
    const std::vector<Tag> tags = tags_of(request.tokens, request.extra_key);
    for (std::int64_t i = 0; i < query_len; ++i) {
      const auto position =
          static_cast<std::size_t>(buffers.positions[static_cast<std::size_t>(i)]);
      cache.write(buffers.slot_mapping[static_cast<std::size_t>(i)], tags.at(position));
    }
    request.num_computed = num_tokens;
    if (has_offloading) manager.end_step(manager.begin_step());
    verify(request);
  }
  void publish(const Request& request) {
    manager.publish(request.id, {}, request.num_computed);
    manager.check_invariants();
    verify(request);
  }
  Request prefill(SeqId id, std::vector<TokenId> prompt, std::string extra_key = {}) {
    Request request = start(id, std::move(prompt), std::move(extra_key));
    compute(request);
    publish(request);
    return request;
  }
  // What an engine does after a step of a model with a sliding window.
  void free_behind(const Request& request) {
    manager.free_behind(request.id,
                        std::max<std::int64_t>(request.num_computed - request.window + 1, 0));
    manager.check_invariants();
    verify(request);
  }
  // A decode step with this token as its input.
  void decode(Request& request, TokenId token) {
    const std::vector<BlockCopy> copies = manager.append(request.id);
    run_moves();
    cache.copy(copies);
    manager.publish(request.id, {&token, 1}, request.num_computed);
    request.tokens.push_back(token);
    compute(request);
    publish(request);
  }
  void verify(const Request& request) const {
    cache.verify(manager, request.id, tags_of(request.tokens, request.extra_key),
                 request.num_computed);
  }

  BlockManager manager;
  CacheModel cache;
  bool has_offloading;
};

}  // namespace pagedkv::testing
