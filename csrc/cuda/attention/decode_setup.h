// What the launcher of decode attention works out for the kernel: tensor maps of the cache, and
// divisors as reciprocals, since a short decode lasts about as long as its few hundred
// instructions.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace pagedkv::cuda {

// n / divisor by a multiplication, exact while n * divisor < 2^32.
struct Reciprocal {
  uint32_t factor;  // ceil(2^32 / divisor); 0 stands for 2^32
  uint32_t divisor;

  static Reciprocal of(int64_t divisor) {
    return {static_cast<uint32_t>(((int64_t{1} << 32) + divisor - 1) / divisor),
            static_cast<uint32_t>(divisor)};
  }
#if defined(__CUDACC__)
  // Beyond that at most 1 too much.
  __device__ uint32_t quotient(uint32_t n) const { return divisor == 1 ? n : __umulhi(n, factor); }
  __device__ int quotient(int n) const {
    return static_cast<int>(quotient(static_cast<uint32_t>(n)));
  }
#endif
};

struct DecodeSetup {
  CUtensorMap key;  // sm_90
  CUtensorMap value;
  int box_rows;     // keys of a box: divides block_size and a unit's keys, a multiple of 8
  int box_columns;  // columns of 128 bytes of a box: all, or 1
  Reciprocal group;
  Reciprocal kv_heads;
  Reciprocal block_spans;  // block_size / 8
  Reciprocal blocks;       // of the grid
  Reciprocal ranges;       // most ranges: warps of the grid that multiply
  unsigned slots;          // of the kernel of small batches: blocks a KV head
  int window;              // 0: unlimited
  float logit_factor;      // LogitScale's, without k_scale
};

}  // namespace pagedkv::cuda
