// rms_norm, and the form that first adds into the residual.
//
// Grid: one block a row. The row stays in registers between the sum of squares and the product, so
// memory is read and written once: 2 * hidden elements a row, 4 * hidden with the residual.
// Instantiations: 3 types x {with, without residual} x {1, 4 vectors a thread, streamed} = 18.
#include "cuda/device/global_store.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/overlapped_launch.cuh"
#include "cuda/layers/row_scale.cuh"
#include "pagedkv/kernels/cuda_launchers.h"

namespace pagedkv::cuda {
namespace {

constexpr int kMaxThreads = 1024;

// One row of either op, by name: where x comes from, where the sum and the result go.
template <class T>
struct NormRow {
  const T* input;
  T* residual;  // read, and written with input + residual; unused without residual
  const T* weight;
  T* out;
  int64_t hidden_size;
  float epsilon;
};

// kItems vectors of kVec elements a thread, in registers, as they are stored: 16-bit rows take half
// the registers that way, and more blocks are resident. Weights are read while the row is on its
// way; beside a residual there are no registers left for that, and no need.
template <class T, int kVec, int kItems, bool kWithResidual>
__device__ void norm_row_in_registers(const NormRow<T>& row) {
  constexpr bool kEarlyWeights = !kWithResidual;
  __shared__ float scratch[32];
  const int vecs = static_cast<int>(row.hidden_size) / kVec;
  Vec<T, kVec> x[kItems];
  Vec<T, kVec> other[kItems];  // the residual, then the weights
  const auto for_each_item = [&](const auto& body) {
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      const int v = static_cast<int>(threadIdx.x) + item * static_cast<int>(blockDim.x);
      if (v < vecs) body(item, static_cast<int64_t>(v) * kVec);
    }
  };
  for_each_item([&](int item, int64_t at) { x[item] = load_vec<kVec>(row.input + at); });
  const T* second = kWithResidual ? row.residual : row.weight;
  for_each_item([&](int item, int64_t at) { other[item] = load_vec<kVec>(second + at); });
  float squares = 0.0f;
  for_each_item([&](int item, int64_t at) {
    Vec<float, kVec> wide = widen(x[item]);
    if constexpr (kWithResidual) {
      const Vec<float, kVec> old = widen(other[item]);
#pragma unroll
      for (int i = 0; i < kVec; ++i) wide.data[i] += old.data[i];
      // The norm is of the residual as it is stored.
      x[item] = narrow<T>(wide);
      store_global<kVec>(row.residual + at, x[item]);
      wide = widen(x[item]);
    }
#pragma unroll
    for (int i = 0; i < kVec; ++i) squares += wide.data[i] * wide.data[i];
  });
  const float sum =
      block_sum(squares, static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), scratch);
  const float mean = sum / static_cast<float>(row.hidden_size);
  const float factor = rsqrtf(mean + row.epsilon);
  for_each_item([&](int item, int64_t at) {
    if constexpr (!kEarlyWeights) other[item] = load_vec<kVec>(row.weight + at);
    Vec<float, kVec> wide = widen(x[item]);
    const Vec<float, kVec> weight = widen(other[item]);
#pragma unroll
    for (int i = 0; i < kVec; ++i) wide.data[i] *= factor * weight.data[i];
    store_global<kVec>(row.out + at, narrow<T>(wide));
  });
}

// Any size and alignment: the row is read twice.
template <class T, bool kWithResidual>
__device__ void norm_row_streamed(const NormRow<T>& row) {
  __shared__ float scratch[32];
  float squares = 0.0f;
  for (int64_t i = threadIdx.x; i < row.hidden_size; i += blockDim.x) {
    float x = to_float(row.input[i]);
    if constexpr (kWithResidual) {
      const T rounded = from_float<T>(x + to_float(row.residual[i]));
      row.residual[i] = rounded;
      x = to_float(rounded);
    }
    squares += x * x;
  }
  const float sum =
      block_sum(squares, static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), scratch);
  const float mean = sum / static_cast<float>(row.hidden_size);
  const float factor = rsqrtf(mean + row.epsilon);
  for (int64_t i = threadIdx.x; i < row.hidden_size; i += blockDim.x) {
    const float x = to_float(kWithResidual ? row.residual[i] : row.input[i]);
    row.out[i] = from_float<T>(x * factor * to_float(row.weight[i]));
  }
}

// kItems 0: streamed.
template <class T, int kItems>
__device__ void norm_row(const NormRow<T>& row, std::bool_constant<true>) {
  if constexpr (kItems == 0) {
    norm_row_streamed<T, true>(row);
  } else {
    norm_row_in_registers<T, kVecElements<T>, kItems, true>(row);
  }
}

template <class T, int kItems>
__device__ void norm_row(const NormRow<T>& row, std::bool_constant<false>) {
  if constexpr (kItems == 0) {
    norm_row_streamed<T, false>(row);
  } else {
    norm_row_in_registers<T, kVecElements<T>, kItems, false>(row);
  }
}

template <class T, int kItems>
__global__ void __launch_bounds__(kMaxThreads)
    rms_norm_kernel(const __grid_constant__ RmsNormParams params) {
  // The product behind it may start as soon as there is room, to ask for its weights.
  allow_next_kernel();
  wait_previous_kernel();
  const int64_t token = blockIdx.x;
  norm_row<T, kItems>(
      NormRow<T>{.input = static_cast<const T*>(params.input) + token * params.input_stride_token,
                 .residual = nullptr,
                 .weight = static_cast<const T*>(params.weight),
                 .out = static_cast<T*>(params.out) + token * params.out_stride_token,
                 .hidden_size = params.hidden_size,
                 .epsilon = params.epsilon},
      std::bool_constant<false>{});
}

template <class T, int kItems>
__global__ void __launch_bounds__(kMaxThreads)
    fused_add_rms_norm_kernel(const __grid_constant__ FusedAddRmsNormParams params) {
  begin_overlapped_kernel();
  const int64_t token = blockIdx.x;
  T* input = static_cast<T*>(params.input) + token * params.input_stride_token;
  norm_row<T, kItems>(NormRow<T>{.input = input,
                                 .residual = static_cast<T*>(params.residual) +
                                             token * params.residual_stride_token,
                                 .weight = static_cast<const T*>(params.weight),
                                 .out = input,
                                 .hidden_size = params.hidden_size,
                                 .epsilon = params.epsilon},
                      std::bool_constant<true>{});
}

// body(items, threads): how many vectors a thread holds, 0 if the row is streamed.
template <class T, class Body>
void with_row_shape(int64_t hidden_size, bool wide, const Body& body) {
  const int64_t vecs = hidden_size / kVecElements<T>;
  const auto threads_for = [](int64_t items) {
    return static_cast<unsigned>(max(int64_t{32}, ceil_div(items, 32) * 32));
  };
  if (wide && vecs <= 128) return body(std::integral_constant<int, 1>{}, threads_for(vecs));
  if (wide && vecs <= 4 * kMaxThreads) {
    return body(std::integral_constant<int, 4>{}, threads_for(ceil_div(vecs, 4)));
  }
  return body(std::integral_constant<int, 0>{}, 512u);
}

}  // namespace

void launch_rms_norm(const RmsNormParams& params, StreamHandle stream) {
  if (params.num_tokens == 0) return;
  with_activation_type(params.type, [&]<class T>(std::type_identity<T>) {
    constexpr int64_t kElement = sizeof(T);
    const bool wide =
        params.hidden_size % kVecElements<T> == 0 &&
        aligned_to(16, {params.out, params.input, params.weight},
                   {params.out_stride_token * kElement, params.input_stride_token * kElement});
    with_row_shape<T>(params.hidden_size, wide, [&](auto items, unsigned threads) {
      launch_overlapped("rms_norm", rms_norm_kernel<T, items()>, grid_size(params.num_tokens),
                        threads, static_cast<cudaStream_t>(stream), params);
    });
  });
}

void launch_fused_add_rms_norm(const FusedAddRmsNormParams& params, StreamHandle stream) {
  if (params.num_tokens == 0) return;
  with_activation_type(params.type, [&]<class T>(std::type_identity<T>) {
    constexpr int64_t kElement = sizeof(T);
    const bool wide =
        params.hidden_size % kVecElements<T> == 0 &&
        aligned_to(16, {params.input, params.residual, params.weight},
                   {params.input_stride_token * kElement, params.residual_stride_token * kElement});
    with_row_shape<T>(params.hidden_size, wide, [&](auto items, unsigned threads) {
      launch_overlapped("fused_add_rms_norm", fused_add_rms_norm_kernel<T, items()>,
                        grid_size(params.num_tokens), threads, static_cast<cudaStream_t>(stream),
                        params);
    });
  });
}

}  // namespace pagedkv::cuda
