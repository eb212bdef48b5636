// The keyed hash against the published vectors of its authors: key 00 01 .. 0f, message 00 01 .. of
// n bytes.

#include <array>
#include <iomanip>

#include "check.h"
#include "pagedkv/core/siphash.h"

namespace pagedkv {
namespace {

std::string hex(const Hash128& hash) {
  std::ostringstream out;
  for (const std::uint64_t word : {hash.low, hash.high}) {
    for (int byte = 0; byte < 8; ++byte) {
      out << std::hex << std::setw(2) << std::setfill('0') << ((word >> (8 * byte)) & 0xff);
    }
  }
  return out.str();
}

Hash128 hash_of_counting(std::size_t num_bytes) {
  std::array<unsigned char, 64> message{};
  for (std::size_t i = 0; i < message.size(); ++i) message[i] = static_cast<unsigned char>(i);
  return SipHash128({.low = 0x0706050403020100, .high = 0x0f0e0d0c0b0a0908})
      .finish_with(message.data(), num_bytes, 0);
}

TEST(SipHash128, equals_the_authors_vectors) {
  EXPECT_EQ(hex(hash_of_counting(0)), "a3817f04ba25a8e66df67214c7550293");
  EXPECT_EQ(hex(hash_of_counting(1)), "da87c1d86b99af44347659119b22fc45");
  EXPECT_EQ(hex(hash_of_counting(7)), "a1f1ebbed8dbc153c0b84aa61ff08239");
  EXPECT_EQ(hex(hash_of_counting(8)), "3b62a9ba6258f5610f83e264f31497b4");
  EXPECT_EQ(hex(hash_of_counting(15)), "5493e99933b0a8117e08ec0f97cfc3d9");
  EXPECT_EQ(hex(hash_of_counting(16)), "6ee2a4ca67b054bbfd3315bf85230577");
  EXPECT_EQ(hex(hash_of_counting(63)), "5150d1772f50834a503e069a973fbd7c");
}

TEST(SipHash128, depends_on_both_halves_of_the_key) {
  const std::uint64_t message = 7;
  const Hash128 one = SipHash128({.low = 1, .high = 2}).finish_with(&message, 8, 0);
  EXPECT_NE(hex(one), hex(SipHash128({.low = 3, .high = 2}).finish_with(&message, 8, 0)));
  EXPECT_NE(hex(one), hex(SipHash128({.low = 1, .high = 3}).finish_with(&message, 8, 0)));
}

TEST(SipHash128, absorbing_words_is_hashing_their_bytes) {
  SipHash128 hash({.low = 1, .high = 2});
  hash.absorb(0x1122334455667788);
  const unsigned char tail[3] = {9, 8, 7};
  const unsigned char whole[11] = {0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 9, 8, 7};
  EXPECT_EQ(hex(hash.finish_with(tail, 3, 8)),
            hex(SipHash128({.low = 1, .high = 2}).finish_with(whole, 11, 0)));
}

}  // namespace
}  // namespace pagedkv
