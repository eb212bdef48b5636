// The input of streamed_linear: into shared memory, whole or in chunks, and normed there.
#pragma once

#include "cuda/device/numeric.cuh"
#include "cuda/linear/weight_stream.cuh"

namespace pagedkv::cuda {

// Barrier of the threads that multiply.
__device__ inline void sync_multipliers() { sync_threads(1, StreamTraits::kThreads); }

// Starts copies of a chunk of all rows of the input to shared memory; past their end zeros.
__device__ inline void load_chunk(const StreamedLinearParams& params, const StreamSetup& setup,
                                  int chunk, char* to) {
  constexpr int kStepBytes = StreamTraits::kWarps * StreamTraits::kSlab * 2;
  const int first = chunk * setup.chunk * kStepBytes;
  const int all = static_cast<int>(params.in_features) * 2;
  const int bytes = min(setup.chunk * kStepBytes, setup.slabs * StreamTraits::kSlab * 2 - first);
#pragma unroll 1
  for (int row = 0; row < static_cast<int>(params.num_tokens); ++row) {
    const char* from =
        static_cast<const char*>(params.input) + 2 * row * params.input_stride_token + first;
#pragma unroll 4
    for (int at = static_cast<int>(threadIdx.x) * 16; at < bytes;
         at += StreamTraits::kThreads * 16) {
      const bool inside = first + at < all;
      copy_async_16(shared_address(to + row * setup.input_pitch + at),
                    inside ? from + at : params.input, inside);
    }
  }
  commit_copies();
}

// The weights of the norm to shared memory: each thread those that it needs itself.
__device__ inline void load_norm(const StreamedLinearParams& params, char* to) {
  const char* weight = static_cast<const char*>(params.norm_weight);
  const int bytes = static_cast<int>(params.in_features) * 2;
  for (int at = static_cast<int>(threadIdx.x) * 16; at < bytes; at += StreamTraits::kThreads * 16) {
    copy_async_16(shared_address(to + at), weight + at, true);
  }
}

// Norms the rows in shared memory. A row's squares are summed in kParts parts, always in the same
// order, whatever rows stand beside it.
template <class T>
__device__ void norm_input(const StreamedLinearParams& params, const StreamSetup& setup,
                           char* input, const char* norm,
                           float (&squares)[StreamTraits::kRows][StreamTraits::kParts]) {
  constexpr int kParts = StreamTraits::kParts;
  static_assert(kParts == StreamTraits::kWarps);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int num_rows = static_cast<int>(params.num_tokens);
  const int vectors = static_cast<int>(params.in_features) / 8;
  const auto vector_at = [&](int row, int v) {
    return reinterpret_cast<T*>(input + row * setup.input_pitch) + v * 8;
  };
#pragma unroll 2
  for (int row = 0; row < num_rows; ++row) {
    float sum = 0.0f;
#pragma unroll 2
    for (int v = warp * 32 + lane; v < vectors; v += kParts * 32) {
      const Vec<float, 8> x = widen(load_vec<8>(vector_at(row, v)));
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += x.data[i] * x.data[i];
    }
    sum = warp_sum(sum);
    if (lane == 0) squares[row][warp] = sum;
  }
  sync_multipliers();
  if (static_cast<int>(threadIdx.x) < num_rows) {
    float sum = 0.0f;
#pragma unroll
    for (int part = 0; part < kParts; ++part) sum += squares[threadIdx.x][part];
    squares[threadIdx.x][0] = rsqrtf(sum / static_cast<float>(params.in_features) + params.epsilon);
  }
  sync_multipliers();
#pragma unroll 1
  for (int v = static_cast<int>(threadIdx.x); v < vectors; v += StreamTraits::kThreads) {
    const Vec<float, 8> weight = widen(load_vec<8>(reinterpret_cast<const T*>(norm) + v * 8));
#pragma unroll 2
    for (int row = 0; row < num_rows; ++row) {
      const float factor = squares[row][0];
      Vec<float, 8> x = widen(load_vec<8>(vector_at(row, v)));
#pragma unroll
      for (int i = 0; i < 8; ++i) x.data[i] *= factor * weight.data[i];
      store_vec<8>(vector_at(row, v), narrow<T>(x));
    }
  }
  sync_multipliers();
}

}  // namespace pagedkv::cuda
