// Prefill attention on Hopper: wgmma, tensor copies, three roles. 16-bit caches, head_dim <= 128.
//
// Grid: one block a multiprocessor, which takes tiles of 128 packed rows of one (sequence, KV head)
// until there are none left. Warpgroups 1 and 2 each multiply 64 rows; warp 0 of warpgroup 0
// chooses the tiles and feeds them tiles of 128 keys, warp 1 of 128 values, one box of a block's
// rows an instruction; warps 2 and 3 gather the next tile's queries. All hand over by mbarriers, so
// the copies run ahead across tiles. FLOPs: 4 * rows * keys * head_dim.
//
// Work says what the tiles are: prefill's (prefill_work.cuh), or those over shared prefixes
// (prefix_work.cuh).
#pragma once

#include "cuda/attention/prefill_feed.cuh"
#include "cuda/attention/prefill_multiply.cuh"

namespace pagedkv::cuda {

template <class Traits, class Work>
struct PrefillShared {
  TileRing ring;
  PrefillBarriers<Traits> barriers;
  typename Work::template Scratch<Traits::kThreads> scratch;
};

template <int kStages>
__device__ void init_pipeline(PipelineBarriers<kStages>& barriers, int fillers, int readers) {
  for (int i = 0; i < kStages; ++i) {
    init_barrier(shared_address(&barriers.full[i]), fillers);
    init_barrier(shared_address(&barriers.empty[i]), readers);
  }
}

// counter: of tiles taken, 0 at the start; or null. May start while decode, launched before it,
// runs: reads nothing of it.
template <class T, int kDim, class Work>
__global__ void __launch_bounds__(WgmmaTraits<kDim>::kThreads, 1)
    prefill_wgmma_kernel(const __grid_constant__ PagedAttentionParams params,
                         const __grid_constant__ CUtensorMap key_map,
                         const __grid_constant__ CUtensorMap value_map, int box_rows,
                         unsigned* counter) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Traits = WgmmaTraits<kDim>;
  using KeyFeeder = BoxFeeder<Traits, Traits::kKeyStages>;
  using ValueFeeder = BoxFeeder<Traits, Traits::kValueStages>;
  extern __shared__ char unaligned[];
  __shared__ PrefillShared<Traits, Work> shared;
  char* operands = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  const uint32_t queries = shared_address(operands);
  const uint32_t keys = queries + Traits::kQueryStages * Traits::kQueryBytes;
  const uint32_t values = keys + Traits::kKeyStages * Traits::kTileBytes;
  if (threadIdx.x == 0) {
    constexpr int kMultiplyingWarps = 4 * Traits::kWarpgroups;
    init_pipeline(shared.barriers.queries, Traits::kQueryLoaders, kMultiplyingWarps);
    init_pipeline(shared.barriers.keys, 1, kMultiplyingWarps);
    init_pipeline(shared.barriers.values, 1, kMultiplyingWarps);
    init_pipeline(shared.ring.barriers, 1, kMultiplyingWarps + 3);
    publish_shared_writes();
  }
  // Has a barrier of the block inside, behind which the mbarriers can be used.
  const auto tiles =
      Work::template plan<Traits::kThreads, Traits::kRows, Traits::kKeys>(params, shared.scratch);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < 128) {
    give_registers<40>();
    if (thread < 32) {
      feed_keys<Traits, T, Work>(
          params, KeyFeeder(params, &key_map, shared.barriers.keys, keys, box_rows, thread), tiles,
          shared.ring, counter, thread);
    } else if (thread < 64) {
      feed_values<Traits>(
          ValueFeeder(params, &value_map, shared.barriers.values, values, box_rows, thread % 32),
          shared.ring, thread % 32);
    } else {
      feed_queries<Traits, T>(params, shared.ring, shared.barriers.queries, queries, thread - 64);
    }
  } else {
    take_registers<232>();
    PrefillMultiplier<Traits, T, Work>(params, shared.ring, shared.barriers, queries, keys, values,
                                       operands + (values - queries), thread - 128)
        .run();
  }
  Work::end();
#else
  __trap();  // built for another architecture: launch_prefill_attention does not come here
#endif
}

}  // namespace pagedkv::cuda
