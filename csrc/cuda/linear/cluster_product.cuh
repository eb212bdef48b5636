// The multiplying warpgroups of the cluster's product: wgmma with 64 rows of weights as A and the
// input's rows as B, so that few rows cost few instructions.
#pragma once

#include "cuda/linear/cluster_stream.cuh"

namespace pagedkv::cuda {

// c += A B^T, A 64 x 16 and B 8 kColumns x 16 in shared memory, rows of the product's k; for 64
// and 128 columns wgmma.cuh has it.
#define PAGEDKV_LIST_2 "%0,%1,%2,%3,%4,%5,%6,%7"
#define PAGEDKV_LIST_4 PAGEDKV_LIST_2 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define PAGEDKV_LIST_12                                                                      \
  PAGEDKV_LIST_4                                                                             \
  ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37" \
  ",%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define PAGEDKV_SUM(x) "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
#define PAGEDKV_SUMS_2(c, i) PAGEDKV_SUM(c[i]), PAGEDKV_SUM(c[i + 1])
#define PAGEDKV_SUMS_4(c, i) PAGEDKV_SUMS_2(c, i), PAGEDKV_SUMS_2(c, i + 2)
#define PAGEDKV_SUMS_12(c, i) \
  PAGEDKV_SUMS_4(c, i), PAGEDKV_SUMS_4(c, i + 4), PAGEDKV_SUMS_4(c, i + 8)
#define PAGEDKV_ADD_PRODUCT(element, type, tiles, columns, a_at, b_at)                \
  template <class T>                                                                  \
    requires(std::is_same_v<T, element>)                                              \
  __device__ inline void add_product(float (&c)[tiles][4], uint64_t a, uint64_t b) {  \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type \
                 " {" PAGEDKV_LIST_##tiles "}, " a_at ", " b_at ", 1, 1, 1, 0, 0;\n"  \
                 : PAGEDKV_SUMS_##tiles(c, 0)                                         \
                 : "l"(a), "l"(b));                                                   \
  }
#define PAGEDKV_ADD_PRODUCTS(tiles, columns, a_at, b_at)                 \
  PAGEDKV_ADD_PRODUCT(__nv_bfloat16, "bf16", tiles, columns, a_at, b_at) \
  PAGEDKV_ADD_PRODUCT(__half, "f16", tiles, columns, a_at, b_at)
PAGEDKV_ADD_PRODUCTS(2, "16", "%8", "%9")
PAGEDKV_ADD_PRODUCTS(4, "32", "%16", "%17")
PAGEDKV_ADD_PRODUCTS(12, "96", "%48", "%49")
#undef PAGEDKV_ADD_PRODUCTS
#undef PAGEDKV_ADD_PRODUCT
#undef PAGEDKV_SUMS_12
#undef PAGEDKV_SUMS_4
#undef PAGEDKV_SUMS_2
#undef PAGEDKV_SUM
#undef PAGEDKV_LIST_12
#undef PAGEDKV_LIST_4
#undef PAGEDKV_LIST_2

template <class T, int kColumns>
  requires(kColumns == 8 || kColumns == 16)
__device__ inline void add_product(float (&c)[kColumns][4], uint64_t a, uint64_t b) {
  multiply_rows<T>(c, a, b, true);
}

// Descriptor of what lies in shared memory in groups of 8 swizzled rows, group_bytes apart.
__device__ inline uint64_t group_descriptor(uint32_t address, int group_bytes) {
  return 0x4000000000000000u | static_cast<uint64_t>(group_bytes >> 4) << 32 |
         (address & 0x3ffff) >> 4;
}

// A warpgroup's sums of a pass: those of its tiles, in wgmma's layout.
template <int kRows>
struct ClusterSums {
  float at[ClusterTraits::kTiles][kRows / 8][4];

  __device__ void reset() {
    write_out<ClusterTraits::kTiles>([&](int tile) {
      write_out<kRows / 8>([&](int n) { write_out<4>([&](int i) { at[tile][n][i] = 0.0f; }); });
    });
  }
};

template <class T, int kRows>
class ClusterMultiplier {
 public:
  using Traits = ClusterTraits;

  __device__ ClusterMultiplier(const ClusterSetup& setup, const ClusterPart& part,
                               const ClusterRing<kRows>& ring)
      : setup_(setup),
        steps_(part.steps),
        ring_(ring),
        warpgroup_(static_cast<int>(threadIdx.x) / 128),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  // The sums of this block's part of a pass. The last tile may have rows behind those of the pass:
  // whatever lies there, their sums are not stored.
  __device__ void multiply_pass(ClusterSums<kRows>& sums) {
    sums.reset();
    const int tiles = (setup_.pass_rows() + Traits::kTileRows - 1) / Traits::kTileRows;
    switch ((tiles - warpgroup_ + Traits::kWarpgroups - 1) / Traits::kWarpgroups) {
      case 0:
        return multiply_steps<0>(sums);
      case 1:
        return multiply_steps<1>(sums);
      default:
        return multiply_steps<Traits::kTiles>(sums);
    }
  }

  // To [kRows, pitch] fp32 in shared memory, columns in the order of the pass's rows.
  __device__ void store(const ClusterSums<kRows>& sums, float* to, int pitch) const {
    const int warp = static_cast<int>(threadIdx.x) % 128 / 32;
    write_out<Traits::kTiles>([&](int i) {
      const int row =
          (i * Traits::kWarpgroups + warpgroup_) * Traits::kTileRows + warp * 16 + lane_ / 4;
      float* column = to + row + lane_ % 4 * 2 * pitch;
      write_out<2>([&](int half) {
        if (row + half * 8 >= setup_.pass_rows()) return;
        write_out<kRows / 8>([&](int n) {
          column[n * 8 * pitch + half * 8] = sums.at[i][n][half * 2];
          column[(n * 8 + 1) * pitch + half * 8] = sums.at[i][n][half * 2 + 1];
        });
      });
    });
  }

 private:
  template <int kTiles>
  __device__ void multiply_steps(ClusterSums<kRows>& sums) {
    using Step = ClusterStep<kRows>;
    constexpr int kGroupBytes = 8 * Step::kRowBytes;
    constexpr int kTileBytes = Traits::kTileRows * Step::kRowBytes;
    RingPlace read = place_;
#pragma unroll 1
    for (int step = 0; step < steps_; ++step) {
      wait_barrier(ring_.full + place_.stage * 8, place_.parity);
      if constexpr (kTiles > 0) {
        const uint64_t weights =
            group_descriptor(ring_.weights(place_.stage) + warpgroup_ * kTileBytes, kGroupBytes);
        const uint64_t input =
            group_descriptor(ring_.input(place_.stage), 8 * Traits::kSlabRowBytes);
        begin_products();
        write_out<Step::kSlabs * 4>([&](int k) {
          const int slab = k / 4, inside = k % 4 * 32;
          write_out<kTiles>([&](int i) {
            add_product<T>(sums.at[i],
                           weights + ((i * Traits::kWarpgroups * kTileBytes +
                                       slab * 8 * Traits::kSlabRowBytes + inside) >>
                                      4),
                           input + ((slab * kRows * Traits::kSlabRowBytes + inside) >> 4));
          });
        });
        commit_products();
        if (step > 0) {  // the step before this one is done; this one goes on beside the next
          wait_products<1>();
          give_back(read);
        }
      } else {
        give_back(read);
      }
      place_.advance(setup_.stages);
    }
    if constexpr (kTiles > 0) {
      wait_products<0>();
      write_out<kTiles>([&](int i) { pin(sums.at[i]); });
      if (steps_ > 0) give_back(read);
    }
  }

  // This warp has read the stage.
  __device__ void give_back(RingPlace& read) const {
    if (lane_ == 0) arrive(ring_.empty + read.stage * 8);
    read.advance(setup_.stages);
  }

  const ClusterSetup& setup_;
  int steps_;
  const ClusterRing<kRows>& ring_;
  int warpgroup_;
  int lane_;
  RingPlace place_;
};

}  // namespace pagedkv::cuda
