// streamed_linear of 129 to 256 rows with the gate: a product that reads its weights once and keeps
// the tensor cores busy with all rows at the same time.
//
// Grid: a block a multiprocessor, which multiplies all rows with kColumns rows of the gate's
// weights and those that belong to them: both results then lie in registers of the same thread. A
// column's sums have the same order whatever the number of rows.
//
// Must move: N * K elements of weights; from the L2, T * K of the input for each block. Must
// multiply: 2 T N K, of 192 rows or 256. Copies of the input to two blocks of a cluster at once are
// no faster.
#pragma once

#include "cuda/device/global_store.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/overlapped_launch.cuh"
#include "cuda/linear/wide_stream.cuh"
#include "pagedkv/kernels/linear_params.h"

namespace pagedkv::cuda {

// The multiplying warps' work.
template <class T, class Shape>
class WideMultiplier {
 public:
  __device__ WideMultiplier(const StreamedLinearParams& params, const WideSetup& setup,
                            const WideRing& ring)
      : params_(params),
        setup_(setup),
        ring_(ring),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warp_(static_cast<int>(threadIdx.x) / 32) {}

  __device__ void run() const {
    if (Shape::kFeedsItself && threadIdx.x == 0) WideFeed<Shape>(setup_, ring_).begin();
    __syncwarp();
    wait_previous_kernel();
    Sums sums;
    multiply(sums);
    sync_threads(1, Shape::kThreads);  // nobody reads the ring any more: results go there
    write_out<Shape::kChains>([&](int chain) {
      put(sums, chain);
      __syncwarp();
      store((warp_ / 4 * Shape::kChains + chain) * Shape::kTileRows + warp_ % 4 * 16);
      __syncwarp();
    });
  }

 private:
  using Sums = float[Shape::kChains * Shape::kProducts][Shape::kProductTiles][4];

  static constexpr int kPitch = Shape::kColumns * 2 + 16;  // of a row of results, in bytes
  static constexpr int kPieces = Shape::kColumns / 8;      // of a row, 16 bytes each
  static_assert(16 * kPitch * Shape::kWarps <= Shape::kRingBytes);

  __device__ void multiply(Sums& sums) const {
    const uint32_t rows = warp_ / 4 * (Shape::kChains * Shape::kTileRows * Shape::kRowBytes);
    RingPlace place, before;
#pragma unroll 1
    for (int step = 0; step < setup_.steps; ++step) {
      wait_barrier(ring_.full + place.stage * 8, place.parity);
      const uint32_t stage = ring_.stages + place.stage * Shape::kStageBytes;
      const TileDescriptor input(stage + rows, 0);
      const TileDescriptor weights(stage + Shape::kInputBytes, 0);
      begin_products();
      write_out<Shape::kSlab / 16>([&](int k) {
        write_out<Shape::kChains>([&](int chain) {
          write_out<Shape::kProducts>([&](int i) {
            add_product<T>(sums[chain * Shape::kProducts + i],
                           input.at(chain * Shape::kTileRows * Shape::kRowBytes + k * 32),
                           weights.at(i * Shape::kProductTiles * 8 * Shape::kRowBytes + k * 32),
                           k > 0 || step > 0);
          });
        });
      });
      commit_products();
      wait_products<1>();
      const int next = step - 1 + Shape::kStages;  // of the step that these have read
      if (step > 0 && next < setup_.steps) {       // nobody waits for the last ones
        if (lane_ == 0) arrive(ring_.empty + before.stage * 8);
        if (Shape::kFeedsItself && threadIdx.x == 0) {
          WideFeed<Shape>(setup_, ring_).copy(next, before);
        }
        __syncwarp();
      }
      before = place;
      place.advance(Shape::kStages);
    }
    wait_products<0>();
    write_out<Shape::kChains * Shape::kProducts>([&](int i) { pin(sums[i]); });
  }

  // The warp's 16 rows of results, in its part of the ring. Rows meet in no bank.
  __device__ uint32_t results() const { return ring_.stages + warp_ * (16 * kPitch); }

  __device__ void put(const Sums& sums, int chain) const {
    const auto sum = [&](int n, int i) {
      constexpr int kTiles = Shape::kProductTiles;
      return sums[chain * Shape::kProducts + n / kTiles][n % kTiles][i];
    };
    // Of tile n in row lane / 4 + 8 half.
    const auto pair = [&](int n, int half) {
      const float2 gate = rounded(sum(n, half * 2), sum(n, half * 2 + 1));
      const int other = n + Shape::kTiles;
      const float2 up = rounded(sum(other, half * 2), sum(other, half * 2 + 1));
      return pack<T>(gated(gate.x, up.x), gated(gate.y, up.y));
    };
    const uint32_t to = results() + lane_ % 16 * kPitch + lane_ / 16 * 16;
    write_out<Shape::kTiles / 2>([&](int n) {
      stmatrix_x4(to + n * 32,
                  {pair(n * 2, 0), pair(n * 2, 1), pair(n * 2 + 1, 0), pair(n * 2 + 1, 1)});
    });
  }

  // As a product is that is stored.
  __device__ static float2 rounded(float first, float second) {
    const auto pair = __builtin_bit_cast(Vec<T, 2>, pack<T>(first, second));
    const Vec<float, 2> wide = widen(pair);
    return make_float2(wide.data[0], wide.data[1]);
  }

  __device__ static float gated(float gate, float up) {
    return __fdividef(gate, 1.0f + __expf(-gate)) * up;
  }

  __device__ void store(int first_row) const {
    const int64_t first_column = int64_t{blockIdx.x} * Shape::kColumns;
    const int64_t columns = params_.out_features / 2 - first_column;
    T* out = static_cast<T*>(params_.out) + first_column;
    write_out<16 * kPieces / 32>([&](int i) {
      const int row = (i * 32 + lane_) / kPieces;
      const int column = (i * 32 + lane_) % kPieces * 8;
      if (first_row + row >= params_.num_tokens || column >= columns) return;
      const uint4 bits = load_shared_16(results() + row * kPitch + column * 2);
      store_global<8>(out + (first_row + row) * params_.out_stride_token + column,
                      __builtin_bit_cast(Vec<T, 8>, bits));
    });
  }

  const StreamedLinearParams& params_;
  const WideSetup& setup_;
  const WideRing& ring_;
  int lane_;
  int warp_;
};

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kAllThreads, 1)
    wide_linear_kernel(const __grid_constant__ StreamedLinearParams params,
                       const __grid_constant__ WideSetup setup) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char memory[];
  __shared__ uint64_t barriers[2][Shape::kStages];
  const WideRing ring{shared_address(memory), shared_address(barriers[0]),
                      shared_address(barriers[1])};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      init_barrier(ring.full + stage * 8, 1);
      init_barrier(ring.empty + stage * 8, Shape::kWarps);
    }
    publish_shared_writes();
  }
  __syncthreads();
  // Who starts early reads nothing but weights before its own wait.
  allow_next_kernel();
  if constexpr (!Shape::kFeedsItself) {
    if (threadIdx.x >= Shape::kThreads) {
      give_registers<Shape::kFeedRegisters>();
      if (threadIdx.x == Shape::kThreads) WideFeed<Shape>(setup, ring).run();
      return;
    }
    take_registers<Shape::kRegisters>();
  }
  WideMultiplier<T, Shape>(params, setup, ring).run();
#else
  __trap();  // launch_wide_linear does not come here
#endif
}

}  // namespace pagedkv::cuda
