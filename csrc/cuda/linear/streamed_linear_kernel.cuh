// streamed_linear of at most 8 rows: a matrix product whose time is that of reading the weights.
//
// Grid: a block a multiprocessor, each with about equally many columns of the result. One warp
// feeds the ring of weights, from before this kernel's wait for the one before it: between the
// kernels of a layer the memory goes on reading. The others take the input to shared memory, normed
// on the way if asked for, and multiply. Products are mma.sync m16n8k16 with the input's rows as A
// (eight of its sixteen rows are zero) and a tile of weights as B. The warps' sums of a pass meet
// in shared memory and are added in order, by whoever then also stores them: a row's result has the
// same bits whatever rows stand beside it.
//
// Must move: N * K elements of weights.
#pragma once

#include "cuda/linear/streamed_input.cuh"

namespace pagedkv::cuda {

__device__ inline float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// Sums of a pass, by the warp's slabs.
struct PassSums {
  float at[StreamTraits::kTiles][4];

  __device__ void reset() {
#pragma unroll
    for (int tile = 0; tile < StreamTraits::kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) at[tile][i] = 0.0f;
    }
  }
};

// The operands of a warp's step: a slab of the input's rows, and of kTiles tiles. Chunks of 16
// bytes.
template <int kTiles>
struct StepFragments {
  uint32_t input[2][4];  // chunks 4 half .. 4 half + 3
  uint32_t weights[kTiles][2][4];

  // input_at: this lane's row and chunk of the slab; weights_at: the warp's part of the stage.
  __device__ void load(uint32_t input_at, uint32_t weights_at, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      ldmatrix_x4(input[half], input_at + half * 64);
      const int chunk = 4 * half + lane / 8;
      const uint32_t swizzled = weights_at + (lane % 8) * 128 + ((chunk ^ (lane % 8)) * 16);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        ldmatrix_x4(weights[tile][half], swizzled + tile * StreamTraits::kTileBytes);
      }
    }
  }

  template <class T>
  __device__ void multiply(PassSums& sums) const {
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      const int half = quarter / 2;
      const int pair = quarter % 2 * 2;
      const uint32_t x[4] = {input[half][pair], 0u, input[half][pair + 1], 0u};
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        mma_m16n8k16<T>(sums.at[tile], x, weights[tile][half][pair], weights[tile][half][pair + 1]);
      }
    }
  }
};

// Adds the warps' sums of a pass and stores what becomes of them; old: values of out, for kAdd.
template <class T>
class PassResult {
 public:
  __device__ PassResult(const StreamedLinearParams& params, const StreamPasses& passes, int pass)
      : params_(params),
        gated_(passes.tiles_of_unit == 2),
        first_column_(passes.first_unit(pass) * StreamTraits::kTileRows),
        columns_(passes.num_units(pass) * StreamTraits::kTileRows),
        limit_(static_cast<int>(gated_ ? params.out_features / 2 : params.out_features)) {}

  // Before the sums are there.
  __device__ void read_old() {
    if (params_.epilogue != LinearEpilogue::kAdd) return;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      T* at = place(i);
      if (at != nullptr) old_[i] = *at;
    }
  }

  __device__ void store(const float* sums) const {
    const int num_rows = static_cast<int>(params_.num_tokens);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      T* at = place(i);
      if (at == nullptr) continue;
      const auto sum_of = [&](int column, int out_column) {
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < StreamTraits::kWarps; ++warp) {
          sum += sums[(warp * num_rows + row(i)) * StreamTraits::kSumsPitch + column];
        }
        if (params_.bias != nullptr)
          sum += to_float(static_cast<const T*>(params_.bias)[out_column]);
        return to_float(from_float<T>(sum));
      };
      const int c = column(i);
      float y;
      if (gated_) {
        const int pair = c / 8 * 16 + c % 8;
        y = silu(sum_of(pair, first_column_ + c)) * sum_of(pair + 8, limit_ + first_column_ + c);
      } else {
        y = sum_of(c, first_column_ + c);
        if (params_.epilogue == LinearEpilogue::kAdd) y += to_float(old_[i]);
      }
      *at = from_float<T>(y);
    }
  }

 private:
  static constexpr int kItems =
      StreamTraits::kRows * StreamTraits::kColumns / StreamTraits::kThreads;

  // The thread's items: rows and columns of the pass, columns first.
  __device__ int row(int i) const {
    return (static_cast<int>(threadIdx.x) + i * StreamTraits::kThreads) / StreamTraits::kColumns;
  }
  __device__ int column(int i) const {
    return (static_cast<int>(threadIdx.x) + i * StreamTraits::kThreads) % StreamTraits::kColumns;
  }
  __device__ T* place(int i) const {
    const int c = column(i);
    if (row(i) >= params_.num_tokens || c >= columns_ || first_column_ + c >= limit_) {
      return nullptr;
    }
    return static_cast<T*>(params_.out) + row(i) * params_.out_stride_token + first_column_ + c;
  }

  const StreamedLinearParams& params_;
  bool gated_;
  int first_column_;  // of out
  int columns_;       // of out, in the pass
  int limit_;         // columns of out
  T old_[kItems];
};

// The part of shared memory behind the ring.
struct StreamShared {
  char* input;  // [1 or 2 chunks, num_tokens, input_pitch]
  float* sums;  // [2, kWarps, num_tokens, kSumsPitch]
  char* norm;   // [K], if there is a norm

  __device__ StreamShared(char* ring, const StreamedLinearParams& params, const StreamSetup& setup)
      : input(ring + setup.stages * StreamTraits::kStageBytes),
        sums(reinterpret_cast<float*>(input + (setup.whole() ? 1 : 2) * params.num_tokens *
                                                  setup.input_pitch)),
        norm(reinterpret_cast<char*>(sums + 2 * StreamTraits::kWarps * params.num_tokens *
                                                StreamTraits::kSumsPitch)) {}
};

// The multiplying warps' work.
template <class T>
class StreamMultiplier {
 public:
  using Traits = StreamTraits;

  __device__ StreamMultiplier(const StreamedLinearParams& params, const StreamSetup& setup,
                              const StreamPasses& passes, const WeightRing& ring,
                              const StreamShared& shared)
      : params_(params),
        setup_(setup),
        passes_(passes),
        ring_(ring),
        shared_(shared),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        num_rows_(static_cast<int>(params.num_tokens)),
        input_(shared_address(shared.input) + min(lane_ % 8, num_rows_ - 1) * setup.input_pitch +
               lane_ / 8 * 16 + warp_ * (Traits::kSlab * 2)) {}

  // All passes; the first chunk of the input is on its way, or there if it is the only one.
  __device__ void run() {
    int number = 0;  // of chunks so far
#pragma unroll 1
    for (int pass = 0; pass < passes_.count(); ++pass) {
      PassResult<T> result(params_, passes_, pass);
      result.read_old();
      PassSums sums;
      sums.reset();
#pragma unroll 1
      for (int chunk = 0; chunk < setup_.chunks; ++chunk) {
        uint32_t input = input_;
        if (!setup_.whole()) {
          wait_copies<0>();
          sync_multipliers();  // the chunk is there, and the other buffer has been read
          const int bytes = num_rows_ * setup_.input_pitch;
          const int next = chunk + 1 < setup_.chunks ? chunk + 1 : 0;
          if (next > 0 || pass + 1 < passes_.count()) {
            load_chunk(params_, setup_, next, shared_.input + (number + 1) % 2 * bytes);
          }
          input += number % 2 * bytes;
          ++number;
        }
        const int first = chunk * setup_.chunk;
        const int steps = min(setup_.chunk, setup_.steps - first);
        switch (passes_.num_tiles(pass)) {
          case 1:
            multiply_steps<1>(sums, input, first, steps);
            break;
          default:  // the sums of a tile that is not there are not stored
            multiply_steps<Traits::kTiles>(sums, input, first, steps);
        }
      }
      float* of_pass = shared_.sums + pass % 2 * Traits::kWarps * num_rows_ * Traits::kSumsPitch;
      if (lane_ / 4 < num_rows_) {
        float* to = of_pass + (warp_ * num_rows_ + lane_ / 4) * Traits::kSumsPitch + lane_ % 4 * 2;
#pragma unroll
        for (int tile = 0; tile < Traits::kTiles; ++tile) {
          *reinterpret_cast<float2*>(to + tile * Traits::kTileRows) =
              make_float2(sums.at[tile][0], sums.at[tile][1]);
        }
      }
      // Once a pass is enough: who stores this one's has read those of the one before last.
      sync_multipliers();
      result.store(of_pass);
    }
  }

 private:
  template <int kTiles>
  __device__ void multiply_steps(PassSums& sums, uint32_t input, int first, int steps) {
#pragma unroll 1
    for (int step = 0; step < steps; ++step, input += Traits::kWarps * Traits::kSlab * 2) {
      wait_barrier(ring_.full + place_.stage * 8, place_.parity);
      const bool mine = (first + step) * Traits::kWarps + warp_ < setup_.slabs;
      StepFragments<kTiles> fragments;
      if (mine) {
        fragments.load(
            input, ring_.stages + place_.stage * Traits::kStageBytes + warp_ * Traits::kSlabBytes,
            lane_);
      }
      __syncwarp();
      if (lane_ == 0) arrive(ring_.empty + place_.stage * 8);
      if (mine) fragments.template multiply<T>(sums);
      place_.advance(setup_.stages);
    }
  }

  const StreamedLinearParams& params_;
  const StreamSetup& setup_;
  const StreamPasses& passes_;
  const WeightRing& ring_;
  const StreamShared& shared_;
  int warp_;
  int lane_;
  int num_rows_;
  uint32_t input_;  // this lane's row of the fragments, at the warp's first slab
  RingPlace place_;
};

template <class T>
__global__ void __launch_bounds__(StreamTraits::kRegisterThreads)
    streamed_linear_kernel(const __grid_constant__ StreamedLinearParams params,
                           const __grid_constant__ StreamSetup setup) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  using Traits = StreamTraits;
  extern __shared__ __align__(1024) char memory[];
  __shared__ uint64_t barriers[2][Traits::kMaxStages];
  __shared__ float squares[Traits::kRows][Traits::kParts];
  const WeightRing ring{shared_address(memory), shared_address(barriers[0]),
                        shared_address(barriers[1])};
  if (threadIdx.x == Traits::kThreads) ring.init(setup.stages);
  __syncthreads();
  // Who starts early reads nothing but weights before its own wait.
  allow_next_kernel();
  const StreamPasses passes(setup, params.epilogue == LinearEpilogue::kSiluAndMul);
  if (threadIdx.x >= Traits::kThreads) {
    feed_ring(setup, passes, ring, static_cast<int>(threadIdx.x) % 32);
    return;
  }
  const StreamShared shared(memory, params, setup);
  if (params.norm_weight != nullptr) load_norm(params, shared.norm);
  wait_previous_kernel();
  load_chunk(params, setup, 0, shared.input);
  wait_copies<0>();
  if (setup.whole()) {
    sync_multipliers();
    if (params.norm_weight != nullptr) {
      norm_input<T>(params, setup, shared.input, shared.norm, squares);
    }
  }
  StreamMultiplier<T>(params, setup, passes, ring, shared).run();
#else
  __trap();  // launch_streamed_linear does not come here
#endif
}

}  // namespace pagedkv::cuda
