// PrefixCache: content to block, by itself.

#include <random>
#include <set>

#include "manager_state.h"

namespace pagedkv {
namespace {

using testing::tokens;

constexpr std::int32_t kBlockSize = 4;

// Publishes a chain of blocks for tokens under an extra key; the root is held by the test.
void insert_chain(PrefixCache& cache, NodeId root, const std::vector<TokenId>& ids,
                  std::vector<BlockId> blocks) {
  NodeId parent = root;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    PrefixCache::Run run;
    cache.prepare(parent, ids.data() + i * kBlockSize, 1, run);
    cache.insert(blocks[i], parent, run.keys[0], ids.data() + i * kBlockSize);
    parent = blocks[i];
  }
}

std::vector<BlockId> match(const PrefixCache& cache, const std::vector<TokenId>& ids,
                           std::string_view key = {}) {
  std::vector<BlockId> hits;
  cache.match(key, ids, static_cast<std::int64_t>(ids.size()) / kBlockSize, hits);
  return hits;
}

TEST(PrefixCache, finds_the_longest_published_prefix_in_order) {
  PrefixCache cache(64, kBlockSize, "secret", 128);
  std::vector<BlockId> blocks(40);
  for (std::size_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<BlockId>(63 - i);
  const std::vector<TokenId> ids = tokens(40 * kBlockSize);
  insert_chain(cache, cache.acquire_root(""), ids, blocks);
  EXPECT_EQ(match(cache, ids), blocks);
  std::vector<TokenId> changed = ids;
  changed[29 * kBlockSize + 3] = 0;
  EXPECT_EQ(match(cache, changed), std::vector<BlockId>(blocks.begin(), blocks.begin() + 29));
  std::vector<BlockId> hits;
  cache.match("", ids, 7, hits);
  EXPECT_EQ(hits.size(), 7);
  cache.check();
}

TEST(PrefixCache, equal_tokens_below_another_parent_or_extra_key_are_other_content) {
  PrefixCache cache(8, kBlockSize, "secret", 128);
  const std::vector<TokenId> same(2 * kBlockSize, 5);  // two equal blocks in a row
  insert_chain(cache, cache.acquire_root("a"), same, {0, 1});
  EXPECT_EQ(match(cache, same, "a"), (std::vector<BlockId>{0, 1}));
  EXPECT_EQ(match(cache, same, "b").size(), 0);
  EXPECT_EQ(match(cache, same).size(), 0);
  insert_chain(cache, cache.acquire_root("b"), same, {2});
  EXPECT_EQ(match(cache, same, "b"), std::vector<BlockId>{2});
  cache.check();
}

TEST(PrefixCache, a_collision_costs_time_and_never_truth) {
  // One bit of hash: half of all content collides.
  PrefixCache cache(256, kBlockSize, "secret", 1);
  std::vector<NodeId> roots;
  for (int i = 0; i < 16; ++i)
    roots.push_back(cache.acquire_root(std::string(1, static_cast<char>('a' + i))));
  for (BlockId block = 0; block < 256; ++block) {
    insert_chain(cache, roots[block % 16], tokens(kBlockSize, block), {block});
  }
  cache.check();
  for (BlockId block = 0; block < 256; ++block) {
    const std::string key(1, static_cast<char>('a' + block % 16));
    const std::string other(1, static_cast<char>('a' + (block + 1) % 16));
    EXPECT_EQ(match(cache, tokens(kBlockSize, block), key), std::vector<BlockId>{block});
    EXPECT_EQ(match(cache, tokens(kBlockSize, block), other).size(), 0);
  }
}

TEST(PrefixCache, erasing_a_block_erases_all_below_it_children_first) {
  PrefixCache cache(8, kBlockSize, "secret", 128);
  const NodeId root = cache.acquire_root("");
  const std::vector<TokenId> ids = tokens(3 * kBlockSize);
  insert_chain(cache, root, ids, {0, 1, 2});
  insert_chain(cache, 0, tokens(kBlockSize, 100), {3});  // a second child of block 0
  insert_chain(cache, root, tokens(kBlockSize, 200), {4});
  std::vector<BlockId> erased;
  cache.erase(0, [&](BlockId block, const Hash128&) { erased.push_back(block); });
  EXPECT_EQ(erased.size(), 4);
  EXPECT_EQ(erased.back(), 0);
  const auto place = [&](BlockId block) {
    return std::find(erased.begin(), erased.end(), block) - erased.begin();
  };
  EXPECT_LT(place(2), place(1));
  EXPECT_EQ(match(cache, ids).size(), 0);
  EXPECT_EQ(match(cache, tokens(kBlockSize, 200)), std::vector<BlockId>{4});
  EXPECT_EQ(cache.num_published(), 1);
  cache.check();
}

TEST(PrefixCache, the_table_stays_whole_under_random_inserts_and_erasures) {
  // 3 bits of hash make long clusters, so that erasing shifts entries back all the time.
  PrefixCache cache(200, 1, "secret", 3);
  const NodeId root = cache.acquire_root("");
  std::mt19937 random(1);
  std::set<BlockId> there;
  for (int i = 0; i < 4000; ++i) {
    const BlockId block = static_cast<BlockId>(random() % 200);
    if (there.erase(block) > 0) {
      cache.erase(block, [](BlockId, const Hash128&) {});
    } else {
      const TokenId token = block;
      PrefixCache::Run run;
      cache.prepare(root, &token, 1, run);
      cache.insert(block, root, run.keys[0], &token);
      there.insert(block);
    }
    if (i % 97 == 0) cache.check();
  }
  EXPECT_EQ(cache.num_published(), there.size());
  cache.check();
}

TEST(PrefixCache, probes_stay_short_at_full_load) {
  // Cost per look-up does not depend on the pool: the table is at most half full and the keys are
  // spread.
  PrefixCache cache(100000, 1, "secret", 128);
  const NodeId root = cache.acquire_root("");
  for (TokenId token = 0; token < 100000; ++token) {
    PrefixCache::Run run;
    cache.prepare(root, &token, 1, run);
    cache.insert(token, root, run.keys[0], &token);
  }
  const auto& places = TestAccess::places(cache);
  EXPECT_LE(2 * 100000, places.size());
  std::int64_t num_steps = 0;
  std::int64_t longest = 0;
  std::int64_t cluster = 0;
  for (const auto& place : places) {
    cluster = place.block == kNoNode ? 0 : cluster + 1;
    longest = std::max(longest, cluster);
    num_steps += cluster;
  }
  EXPECT_LE(longest, 100);
  EXPECT_LE(num_steps, 4 * 100000);
}

TEST(PrefixCache, a_root_lives_as_long_as_it_has_a_holder_or_a_block) {
  PrefixCache cache(4, kBlockSize, "secret", 128);
  const NodeId root = cache.acquire_root("tenant");
  EXPECT_EQ(cache.acquire_root("tenant"), root);
  insert_chain(cache, root, tokens(kBlockSize), {0});
  cache.release_root(root);
  cache.release_root(root);
  EXPECT_EQ(match(cache, tokens(kBlockSize), "tenant"), std::vector<BlockId>{0});
  cache.erase(0, [](BlockId, const Hash128&) {});
  EXPECT_EQ(TestAccess::num_roots(cache), 1);  // that of the empty key
  for (int i = 0; i < 1000; ++i)
    cache.release_root(cache.acquire_root("salt " + std::to_string(i)));
  EXPECT_EQ(TestAccess::num_roots(cache), 1);
  cache.check();
}

TEST(PrefixCache, keys_depend_on_the_secret_and_are_random_without_one) {
  const auto key = [](const std::optional<std::string>& secret) {
    PrefixCache cache(1, kBlockSize, secret, 128);
    PrefixCache::Run run;
    cache.prepare(cache.acquire_root(""), tokens(kBlockSize).data(), 1, run);
    return run.keys[0];
  };
  EXPECT_TRUE(key("one secret") == key("one secret"));
  EXPECT_FALSE(key("one secret") == key("one secreT"));
  EXPECT_FALSE(key("one secret") == key(std::nullopt));
  EXPECT_TRUE(key(std::nullopt) == key(std::nullopt));  // one per process
}

TEST(PrefixCache, a_weaker_hash_has_the_asked_number_of_bits) {
  for (const int bits : {1, 4, 63, 64, 65, 127, 128}) {
    PrefixCache cache(1, 1, "secret", bits);
    const NodeId root = cache.acquire_root("");
    Hash128 any;
    for (TokenId token = 0; token < 2000; ++token) {
      PrefixCache::Run run;
      cache.prepare(root, &token, 1, run);
      any = {.low = any.low | run.keys[0].low, .high = any.high | run.keys[0].high};
    }
    EXPECT_EQ(std::popcount(any.low) + std::popcount(any.high), bits);
  }
}

TEST(PrefixCache, refuses_an_empty_secret_and_impossible_widths) {
  EXPECT_THROW(PrefixCache(1, 1, "", 128), std::invalid_argument,
               "hash_secret must have at least one byte");
  EXPECT_THROW(PrefixCache(1, 1, "s", 0), std::invalid_argument,
               "hash_bits must be between 1 and 128, got 0");
  EXPECT_THROW(PrefixCache(1, 1, "s", 129), std::invalid_argument, "got 129");
}

}  // namespace
}  // namespace pagedkv
