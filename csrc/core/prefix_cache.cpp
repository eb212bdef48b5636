// The content index: keys, table and forest. The contract is in the header.

#include "pagedkv/core/prefix_cache.h"

#include <algorithm>
#include <random>
#include <utility>

namespace pagedkv {
namespace {

constexpr std::uint64_t kRootTag = 0x746f6f72;     // "root"
constexpr std::uint64_t kBlockTag = 0x6b636f6c62;  // "block"

Hash128 random_secret() {
  std::random_device device;  // the operating system's generator
  const auto word = [&] { return static_cast<std::uint64_t>(device()) << 32 | device(); };
  return {.low = word(), .high = word()};
}

Hash128 make_secret(const std::optional<std::string>& secret) {
  if (!secret) {
    static const Hash128 of_process = random_secret();
    return of_process;
  }
  if (secret->empty())
    throw std::invalid_argument("hash_secret must have at least one byte, got none");
  // A secret of any length becomes a key through the hash itself, under a key that everybody knows.
  return SipHash128({.low = 0x706167656b76, .high = 1})
      .finish_with(secret->data(), secret->size(), 0);
}

Hash128 make_mask(std::int32_t bits) {
  if (bits < 1 || bits > 128) {
    throw std::invalid_argument("hash_bits must be between 1 and 128, got " + std::to_string(bits));
  }
  const auto ones = [](std::int32_t n) { return n <= 0 ? 0 : n >= 64 ? ~0ULL : (1ULL << n) - 1; };
  return {.low = ones(bits), .high = ones(bits - 64)};
}

}  // namespace

PrefixCache::PrefixCache(std::int32_t num_blocks, std::int32_t block_size,
                         const std::optional<std::string>& secret, std::int32_t hash_bits)
    : block_size_(block_size),
      secret_(make_secret(secret)),
      mask_(make_mask(hash_bits)),
      places_(std::bit_ceil(std::max<std::size_t>(2 * static_cast<std::size_t>(num_blocks), 16))),
      entries_(static_cast<std::size_t>(num_blocks)),
      tokens_(static_cast<std::size_t>(num_blocks) * static_cast<std::size_t>(block_size)),
      roots_by_key_(16, KeyedStringHash{secret_}) {
  place_mask_ = static_cast<std::uint32_t>(places_.size() - 1);
  acquire_root("");
}

Hash128 PrefixCache::root_key(std::string_view extra_key) const {
  SipHash128 hash(secret_);
  hash.absorb(kRootTag);
  hash.absorb(extra_key.size());
  return truncated(hash.finish_with(extra_key.data(), extra_key.size(), 16));
}

Hash128 PrefixCache::block_key(const Hash128& parent_key, const TokenId* tokens) const {
  SipHash128 hash(secret_);
  hash.absorb(kBlockTag);
  hash.absorb(static_cast<std::uint64_t>(block_size_));
  hash.absorb(parent_key.low);
  hash.absorb(parent_key.high);
  return truncated(
      hash.finish_with(tokens, static_cast<std::size_t>(block_size_) * sizeof(TokenId), 32));
}

NodeId PrefixCache::acquire_root(std::string_view extra_key) {
  if (const auto found = roots_by_key_.find(extra_key); found != roots_by_key_.end()) {
    add_root_holder(found->second);
    return found->second;
  }
  if (free_roots_.empty()) {
    roots_.emplace_back();
    try {
      free_roots_.reserve(roots_.size());  // so that dropping a root never allocates
      free_roots_.push_back(-static_cast<NodeId>(roots_.size()));
    } catch (...) {
      roots_.pop_back();
      throw;
    }
  }
  const NodeId root = free_roots_.back();
  std::string copy(extra_key);
  roots_by_key_.emplace(copy, root);
  roots_[root_index(root)] = {
      .extra_key = std::move(copy), .key = root_key(extra_key), .num_holders = 1, .is_used = true};
  free_roots_.pop_back();
  return root;
}

void PrefixCache::release_root(NodeId root) {
  --roots_[root_index(root)].num_holders;
  drop_root_if_unused(root);
}

void PrefixCache::drop_root_if_unused(NodeId root) {
  Root& at = roots_[root_index(root)];
  if (at.num_holders > 0 || at.first_child != kNoNode) return;
  roots_by_key_.erase(roots_by_key_.find(at.extra_key));
  at = Root{};
  free_roots_.push_back(root);
}

void PrefixCache::prepare(NodeId parent, const TokenId* tokens, std::int32_t num_blocks,
                          Run& run) const {
  run.num_blocks = num_blocks;
  Hash128 key = key_of(parent);
  for (std::int32_t i = 0; i < num_blocks; ++i) {
    key = run.keys[i] = block_key(key, tokens + static_cast<std::size_t>(i) * block_size_);
    __builtin_prefetch(&places_[key.low & place_mask_]);
  }
}

void PrefixCache::prefetch_found(const Run& run) const {
  for (std::int32_t i = 0; i < run.num_blocks; ++i) {
    const Place& place = places_[run.keys[i].low & place_mask_];
    if (place.block == kNoNode) continue;
    prefetch(place.block);
    __builtin_prefetch(this->tokens(place.block));
  }
}

std::optional<BlockId> PrefixCache::find(NodeId parent, const Hash128& key,
                                         const TokenId* tokens) const {
  const auto fingerprint = static_cast<std::uint32_t>(key.low);
  for (std::uint32_t at = fingerprint & place_mask_; places_[at].block != kNoNode;
       at = (at + 1) & place_mask_) {
    const BlockId block = places_[at].block;
    if (places_[at].fingerprint == fingerprint && entries_[block].parent == parent &&
        std::equal(tokens, tokens + block_size_, this->tokens(block))) {
      return block;
    }
  }
  return std::nullopt;
}

std::optional<Hash128> PrefixCache::match(std::string_view extra_key,
                                          std::span<const TokenId> tokens, std::int64_t max_blocks,
                                          std::vector<BlockId>& hits) const {
  if (max_blocks == 0) return std::nullopt;
  const auto root = roots_by_key_.find(extra_key);
  if (root == roots_by_key_.end()) return block_key(root_key(extra_key), tokens.data());
  if (roots_[root_index(root->second)].first_child == kNoNode)
    return block_key(key_of(root->second), tokens.data());
  NodeId parent = root->second;
  Run run;
  std::int64_t done = 0;
  // Runs grow while they hit: a miss at the start costs one block's hash, a long hit overlaps its
  // memory accesses.
  for (std::int32_t num_wanted = 1; done < max_blocks;
       num_wanted = std::min(2 * num_wanted, kMaxRun)) {
    const auto num_blocks =
        static_cast<std::int32_t>(std::min<std::int64_t>(num_wanted, max_blocks - done));
    const TokenId* at = tokens.data() + done * block_size_;
    prepare(parent, at, num_blocks, run);
    prefetch_found(run);
    for (std::int32_t i = 0; i < num_blocks; ++i) {
      const auto found = find(parent, run.keys[i], at + static_cast<std::size_t>(i) * block_size_);
      if (!found) return run.keys[i];
      hits.push_back(*found);
      parent = *found;
    }
    done += num_blocks;
  }
  return std::nullopt;
}

void PrefixCache::insert(BlockId block, NodeId parent, const Hash128& key, const TokenId* tokens) {
  Entry& entry = entries_[block];
  BlockId& first_child = first_child_of(parent);
  entry = {.key = key, .parent = parent, .next_sibling = first_child};
  if (first_child != kNoNode) entries_[first_child].previous_sibling = block;
  first_child = block;
  std::copy_n(tokens, block_size_, &tokens_[static_cast<std::size_t>(block) * block_size_]);
  const auto fingerprint = static_cast<std::uint32_t>(key.low);
  std::uint32_t at = fingerprint & place_mask_;
  while (places_[at].block != kNoNode) at = (at + 1) & place_mask_;
  places_[at] = {.fingerprint = fingerprint, .block = block};
  ++num_published_;
}

void PrefixCache::erase_leaf(BlockId block) {
  remove_from_table(block);
  Entry& entry = entries_[block];
  const NodeId parent = entry.parent;
  if (entry.next_sibling != kNoNode)
    entries_[entry.next_sibling].previous_sibling = entry.previous_sibling;
  if (entry.previous_sibling != kNoNode) {
    entries_[entry.previous_sibling].next_sibling = entry.next_sibling;
  } else {
    first_child_of(parent) = entry.next_sibling;
  }
  entry = Entry{};
  --num_published_;
  if (parent < 0) drop_root_if_unused(parent);
}

void PrefixCache::move(BlockId from, BlockId to) {
  places_[place_of(from)].block = to;
  const Entry entry = entries_[to] = std::exchange(entries_[from], Entry{});
  std::copy_n(tokens(from), block_size_, &tokens_[static_cast<std::size_t>(to) * block_size_]);
  if (entry.next_sibling != kNoNode) entries_[entry.next_sibling].previous_sibling = to;
  if (entry.previous_sibling != kNoNode) {
    entries_[entry.previous_sibling].next_sibling = to;
  } else {
    first_child_of(entry.parent) = to;
  }
  for (BlockId child = entry.first_child; child != kNoNode; child = entries_[child].next_sibling) {
    entries_[child].parent = to;
  }
}

// Where the table has a published block.
std::uint32_t PrefixCache::place_of(BlockId block) const {
  std::uint32_t at = static_cast<std::uint32_t>(entries_[block].key.low) & place_mask_;
  while (places_[at].block != block) at = (at + 1) & place_mask_;
  return at;
}

void PrefixCache::remove_from_table(BlockId block) {
  std::uint32_t hole = place_of(block);
  // Later entries of the same cluster move back unless that would put them before their home place.
  for (std::uint32_t at = (hole + 1) & place_mask_; places_[at].block != kNoNode;
       at = (at + 1) & place_mask_) {
    const std::uint32_t home = places_[at].fingerprint & place_mask_;
    if (((at - home) & place_mask_) >= ((at - hole) & place_mask_)) {
      places_[hole] = places_[at];
      hole = at;
    }
  }
  places_[hole] = Place{};
}

void PrefixCache::check() const {
  const auto fail = [](const std::string& what, BlockId block) {
    throw InvariantViolation(what + " (block " + std::to_string(block) + ")");
  };
  std::int64_t num_published = 0;
  std::int64_t num_places = 0;
  for (const Place& place : places_) num_places += place.block != kNoNode;
  const auto num_blocks = static_cast<BlockId>(entries_.size());
  for (BlockId block = 0; block < num_blocks; ++block) {
    const Entry& entry = entries_[block];
    if (entry.parent == kNoNode) {
      if (entry.first_child != kNoNode)
        fail("I10: an unpublished block has published children", block);
      continue;
    }
    ++num_published;
    const bool has_parent =
        entry.parent < 0
            ? root_index(entry.parent) < roots_.size() && roots_[root_index(entry.parent)].is_used
            : entry.parent < num_blocks && is_published(entry.parent);
    if (!has_parent) fail("I10: the parent of a published block is not published", block);
    if (entry.key != block_key(key_of(entry.parent), tokens(block))) {
      fail("I4: the hash of a published block is not that of its tokens and parent", block);
    }
    if (find(entry.parent, entry.key, tokens(block)) != block) {
      fail("I4, P1: a published block is not what its content is found as", block);
    }
  }
  if (num_published != num_published_ || num_places != num_published_) {
    throw InvariantViolation("I4: " + std::to_string(num_published) + " blocks are published and " +
                             std::to_string(num_places) + " are in the table, counted " +
                             std::to_string(num_published_));
  }
  // Every published block is reached once from the roots: the forest has no cycle and no lost
  // branch.
  std::int64_t num_reached = 0;
  std::vector<NodeId> todo;
  for (std::size_t i = 0; i < roots_.size(); ++i) todo.push_back(-1 - static_cast<NodeId>(i));
  while (!todo.empty()) {
    const NodeId node = todo.back();
    todo.pop_back();
    BlockId previous = kNoNode;
    for (BlockId child = node < 0 ? roots_[root_index(node)].first_child
                                  : entries_[node].first_child;
         child != kNoNode; child = entries_[child].next_sibling) {
      if (++num_reached > num_published || entries_[child].parent != node ||
          entries_[child].previous_sibling != previous) {
        fail("I10: the children of a node are not those that name it as parent", child);
      }
      previous = child;
      todo.push_back(child);
    }
  }
  if (num_reached != num_published) {
    throw InvariantViolation("I10: " + std::to_string(num_reached) + " of " +
                             std::to_string(num_published) +
                             " published blocks can be reached from their roots");
  }
}

}  // namespace pagedkv
