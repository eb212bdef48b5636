// PrefixCache: which block holds the K/V of which full block of tokens, found again by content.
//
// Published blocks form a forest. A root stands for everything but tokens that changes K/V (the
// caller's extra key: adapter, salt, dtype, model); below it, a block's parent is the block of the
// tokens before it. A block is found by (parent, its tokens), through an open-addressing table over
// a keyed 128-bit hash:
//
//   key(root)  = SipHash-2-4-128("root" tag,  length of the extra key, extra key)
//   key(block) = SipHash-2-4-128("block" tag, length of the block, key(parent), tokens)
//
// Every field has a fixed place or its length before it, so no two inputs have one encoding. The
// key is secret, so nobody outside can aim collisions; and a hit is believed only if the parent and
// all tokens agree, so a collision costs time, never truth. (hash_bits below 128 weakens the hash
// on purpose, for tests of exactly that.)
//
// It holds no ref counts and no states: which blocks are idle, and in which order they are evicted,
// is the BlockAllocator's list (least recently used first; a sequence's blocks go idle tail first,
// so a child is evicted before its parent). Erasing a block erases all below it, for none of them
// could be reached any more.
//
// Thread safety: none; one thread owns it.
//
// Invariants (check() proves them):
//   I4   a published block is in the table under the hash of its own tokens, parent and extra key,
//   exactly once I10  the parent of a published block is a root or published: every published block
//   can be reached from its root P1   no two published blocks have the same parent and the same
//   tokens

#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "pagedkv/core/huge_pages.h"
#include "pagedkv/core/siphash.h"
#include "pagedkv/core/types.h"

namespace pagedkv {

// A node of the forest: a block id, or -1 - i for root i. Block ids from the pool's size on are the
// owner's to give, for content that is elsewhere: a chain may lead from one kind to the other.
using NodeId = std::int32_t;
inline constexpr NodeId kNoNode = std::numeric_limits<NodeId>::min();

class PrefixCache {
 public:
  // secret: any bytes but none; without it, random and the same for the whole process.
  PrefixCache(std::int32_t num_blocks, std::int32_t block_size,
              const std::optional<std::string>& secret, std::int32_t hash_bits);
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  // The root of an extra key, made if need be and kept until every holder has released it and
  // nothing lies below it.
  NodeId acquire_root(std::string_view extra_key);
  void add_root_holder(NodeId root) { ++roots_[root_index(root)].num_holders; }
  void release_root(NodeId root);

  // Appends to hits the blocks of the longest published prefix of tokens, at most max_blocks of
  // them. Returns the hash of the first that was not found, if it has fewer.
  std::optional<Hash128> match(std::string_view extra_key, std::span<const TokenId> tokens,
                               std::int64_t max_blocks, std::vector<BlockId>& hits) const;

  // The walk that publishes a run of blocks: keys first, then the memory they lead to, so that
  // misses overlap.
  static constexpr std::int32_t kMaxRun = 16;
  struct Run {
    Hash128 keys[kMaxRun];
    std::int32_t num_blocks = 0;
  };
  // Keys of the first num_blocks <= kMaxRun blocks of tokens [num_blocks * block_size] below
  // parent; their places in the table are prefetched.
  void prepare(NodeId parent, const TokenId* tokens, std::int32_t num_blocks, Run& run) const;
  // For a run that is expected to be found: prefetches the blocks that stand in its places.
  void prefetch_found(const Run& run) const;
  // The published block with these tokens below this parent.
  std::optional<BlockId> find(NodeId parent, const Hash128& key, const TokenId* tokens) const;
  // Publishes block. REQUIRES: find() has no answer, block is not published, parent is a root or
  // published.
  void insert(BlockId block, NodeId parent, const Hash128& key, const TokenId* tokens);

  // The content of a published block is in another one from now on. REQUIRES: to is not published.
  void move(BlockId from, BlockId to);

  bool is_published(BlockId block) const { return entries_[block].parent != kNoNode; }
  const Hash128& key(BlockId block) const { return entries_[block].key; }  // of a published block
  std::int64_t num_published() const { return num_published_; }
  NodeId parent(BlockId block) const { return entries_[block].parent; }  // kNoNode: not published
  // The tokens of a published block, [block_size].
  const TokenId* tokens(BlockId block) const {
    return &tokens_[static_cast<std::size_t>(block) * block_size_];
  }

  // Forgets block and all below it, children first; on_erased(block, its hash) for each.
  template <class OnErased>
  void erase(BlockId block, OnErased on_erased) {
    for (BlockId at = block;;) {
      while (entries_[at].first_child != kNoNode) at = entries_[at].first_child;
      const NodeId parent = entries_[at].parent;
      const Hash128 key = entries_[at].key;
      erase_leaf(at);
      on_erased(at, key);
      if (at == block) return;
      at = parent;
    }
  }
  // Forgets everything; returns how many blocks were published.
  template <class OnErased>
  std::int64_t clear(OnErased on_erased) {
    const std::int64_t num_before = num_published_;
    for (std::size_t i = 0; i < roots_.size(); ++i) {
      while (roots_[i].first_child != kNoNode) erase(roots_[i].first_child, on_erased);
    }
    return num_before;
  }

  // Bring into the CPU cache what publishing or erasing a block touches: first its entry, then its
  // place in the table.
  void prefetch(BlockId block) const { __builtin_prefetch(&entries_[block]); }
  void prefetch_row(BlockId block) const { __builtin_prefetch(tokens(block), 1); }
  void prefetch_place(BlockId block) const {
    __builtin_prefetch(&places_[entries_[block].key.low & place_mask_]);
  }

  // Throws InvariantViolation.
  void check() const;

 private:
  friend struct TestAccess;
  struct Entry {
    Hash128 key;
    NodeId parent = kNoNode;  // kNoNode: not published
    BlockId first_child = kNoNode;
    BlockId previous_sibling = kNoNode;
    BlockId next_sibling = kNoNode;
  };
  struct Root {
    std::string extra_key;
    Hash128 key;
    BlockId first_child = kNoNode;
    std::int64_t num_holders = 0;
    bool is_used = false;
  };
  // A place of the table: 32 bits of the key say where it belongs and rule out nearly all false
  // candidates without a look at the entry.
  struct Place {
    std::uint32_t fingerprint = 0;
    BlockId block = kNoNode;
  };
  // std::unordered_map's own hash is not keyed, and extra keys come from clients.
  struct KeyedStringHash {
    Hash128 secret;
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const {
      return static_cast<std::size_t>(
          SipHash128(secret).finish_with(text.data(), text.size(), 0).low);
    }
  };
  using RootsByKey = std::unordered_map<std::string, NodeId, KeyedStringHash, std::equal_to<>>;

  static std::size_t root_index(NodeId root) { return static_cast<std::size_t>(-1 - root); }
  Hash128 truncated(Hash128 key) const { return {key.low & mask_.low, key.high & mask_.high}; }
  Hash128 root_key(std::string_view extra_key) const;
  Hash128 block_key(const Hash128& parent_key, const TokenId* tokens) const;
  const Hash128& key_of(NodeId node) const {
    return node < 0 ? roots_[root_index(node)].key : entries_[node].key;
  }
  BlockId& first_child_of(NodeId node) {
    return node < 0 ? roots_[root_index(node)].first_child : entries_[node].first_child;
  }
  void erase_leaf(BlockId block);
  std::uint32_t place_of(BlockId block) const;
  void drop_root_if_unused(NodeId root);
  void remove_from_table(BlockId block);

  std::int32_t block_size_;
  Hash128 secret_;
  Hash128 mask_;
  std::uint32_t place_mask_;    // places_.size() - 1, a power of two less one
  HugeVector<Place> places_;    // at most half full; linear probing, erased by shifting back
  HugeVector<Entry> entries_;   // [num_blocks]
  HugeVector<TokenId> tokens_;  // [num_blocks, block_size]; rows of published blocks are valid
  std::vector<Root> roots_;     // root 0, of the empty extra key, is never dropped
  std::vector<NodeId> free_roots_;
  RootsByKey roots_by_key_;
  std::int64_t num_published_ = 0;
};

}  // namespace pagedkv
