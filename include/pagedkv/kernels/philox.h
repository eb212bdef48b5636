// Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC
// 2011): a draw is a function of (seed, position, draw) alone, the same on CPU and GPU.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define PAGEDKV_EVERYWHERE __host__ __device__
#else
#define PAGEDKV_EVERYWHERE
#endif

namespace pagedkv {

// A number in [0, 1) with 53 random bits: with counter (position low, position high, draw low, draw
// high), key (seed low, seed high) and output words w0, w1: ((w0 << 32 | w1) >> 11) / 2^53.
PAGEDKV_EVERYWHERE inline double philox_uniform(uint64_t seed, uint64_t position, uint64_t draw) {
  uint32_t counter[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32),
                         static_cast<uint32_t>(draw), static_cast<uint32_t>(draw >> 32)};
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t{0xD2511F53} * counter[0];
    const uint64_t second = uint64_t{0xCD9E8D57} * counter[2];
    counter[0] = static_cast<uint32_t>(second >> 32) ^ counter[1] ^ key[0];
    counter[1] = static_cast<uint32_t>(second);
    counter[2] = static_cast<uint32_t>(first >> 32) ^ counter[3] ^ key[1];
    counter[3] = static_cast<uint32_t>(first);
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  const uint64_t word = static_cast<uint64_t>(counter[0]) << 32 | counter[1];
  return static_cast<double>(word >> 11) * 0x1p-53;
}

}  // namespace pagedkv
