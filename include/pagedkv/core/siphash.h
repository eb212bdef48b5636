// SipHash-2-4 with a 128-bit result (Aumasson and Bernstein, 2012; the 128-bit variant of 2013):
// the keyed hash of the prefix cache. Header only, since the rounds must inline into the loop over
// a block's tokens.
//
// The stream form absorbs whole 64-bit little-endian words, because everything hashed here is made
// of words; a final partial word is given to finish(). Written from the specification; checked
// against its vectors in tests/core.

#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace pagedkv {

static_assert(std::endian::native == std::endian::little,
              "tokens are hashed as they lie in memory");

struct Hash128 {
  std::uint64_t low = 0;
  std::uint64_t high = 0;
  friend bool operator==(const Hash128&, const Hash128&) = default;
};

class SipHash128 {
 public:
  explicit SipHash128(Hash128 key)
      : v0_(key.low ^ 0x736f6d6570736575ULL),
        v1_(key.high ^ 0x646f72616e646f6dULL ^ 0xee),
        v2_(key.low ^ 0x6c7967656e657261ULL),
        v3_(key.high ^ 0x7465646279746573ULL) {}

  void absorb(std::uint64_t word) {
    v3_ ^= word;
    round();
    round();
    v0_ ^= word;
  }

  // tail: the num_tail < 8 bytes after the absorbed words. num_bytes: the whole message's length.
  Hash128 finish(const unsigned char* tail, std::size_t num_tail, std::size_t num_bytes) {
    std::uint64_t last = static_cast<std::uint64_t>(num_bytes & 0xff) << 56;
    for (std::size_t i = 0; i < num_tail; ++i)
      last |= static_cast<std::uint64_t>(tail[i]) << (8 * i);
    absorb(last);
    v2_ ^= 0xee;
    for (int i = 0; i < 4; ++i) round();
    const std::uint64_t low = v0_ ^ v1_ ^ v2_ ^ v3_;
    v1_ ^= 0xdd;
    for (int i = 0; i < 4; ++i) round();
    return {.low = low, .high = v0_ ^ v1_ ^ v2_ ^ v3_};
  }

  // Absorbs the words of `bytes` and finishes; num_before bytes were absorbed already.
  Hash128 finish_with(const void* bytes, std::size_t num_bytes, std::size_t num_before) {
    const auto* at = static_cast<const unsigned char*>(bytes);
    const std::size_t num_words = num_bytes / 8;
    for (std::size_t i = 0; i < num_words; ++i) {
      std::uint64_t word;
      std::memcpy(&word, at + 8 * i, 8);
      absorb(word);
    }
    return finish(at + 8 * num_words, num_bytes % 8, num_before + num_bytes);
  }

 private:
  void round() {
    v0_ += v1_;
    v2_ += v3_;
    v1_ = std::rotl(v1_, 13) ^ v0_;
    v3_ = std::rotl(v3_, 16) ^ v2_;
    v0_ = std::rotl(v0_, 32) + v3_;
    v2_ += v1_;
    v3_ = std::rotl(v3_, 21) ^ v0_;
    v1_ = std::rotl(v1_, 17) ^ v2_;
    v2_ = std::rotl(v2_, 32);
  }

  std::uint64_t v0_, v1_, v2_, v3_;
};

}  // namespace pagedkv
