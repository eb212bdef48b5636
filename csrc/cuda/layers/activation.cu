// silu_and_mul and gelu_and_mul: act(first half) * second half of each row.
//
// Grid: x walks the tokens, y the row, kItems vectors a thread. Must move 3 * T * F elements. Rows
// with scales have one block each, which works out the scale while its first vectors are on their
// way; T * hidden elements more.
// Instantiations: 3 types x 3 activations x {16-byte, single} accesses x {plain, scaled} = 36.
#include <stdexcept>
#include <string>

#include "cuda/device/global_store.cuh"
#include "cuda/device/launch.h"
#include "cuda/device/numeric.cuh"
#include "cuda/layers/row_scale.cuh"
#include "pagedkv/kernels/cuda_launchers.h"

namespace pagedkv::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kItems = 2;
constexpr int kScaledThreads = 512;  // at most
constexpr int kScaledItems = 4;

template <Activation kActivation, class T>
__device__ float activate(float x) {
  if constexpr (kActivation == Activation::kSilu) {
    // The fast exponential's error is far below a 16-bit rounding, not below an fp32 one.
    if constexpr (std::is_same_v<T, float>) return x / (1.0f + expf(-x));
    return __fdividef(x, 1.0f + __expf(-x));
  } else if constexpr (kActivation == Activation::kGelu) {
    return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
  } else {
    const float inner = 0.79788456080286536f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + tanhf(inner));
  }
}

template <class T, Activation kActivation, int kVec>
__global__ void __launch_bounds__(kThreads)
    activation_kernel(const __grid_constant__ ActivationParams params) {
  const int64_t token = blockIdx.x;
  const T* gate = static_cast<const T*>(params.input) + token * params.input_stride_token;
  const T* up = gate + params.intermediate_size;
  T* out = static_cast<T*>(params.out) + token * params.out_stride_token;
  const int64_t first = (static_cast<int64_t>(blockIdx.y) * kThreads * kItems + threadIdx.x) * kVec;
  Vec<T, kVec> gates[kItems];
  Vec<T, kVec> ups[kItems];
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const int64_t at = first + static_cast<int64_t>(item) * kThreads * kVec;
    if (at >= params.intermediate_size) continue;
    gates[item] = load_vec<kVec>(gate + at);
    ups[item] = load_vec<kVec>(up + at);
  }
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const int64_t at = first + static_cast<int64_t>(item) * kThreads * kVec;
    if (at >= params.intermediate_size) continue;
    Vec<float, kVec> x = widen(gates[item]);
    const Vec<float, kVec> y = widen(ups[item]);
#pragma unroll
    for (int i = 0; i < kVec; ++i) x.data[i] = activate<kActivation, T>(x.data[i]) * y.data[i];
    store_global<kVec>(out + at, narrow<T>(x));
  }
}

template <class T, Activation kActivation, int kVec>
__global__ void __launch_bounds__(kScaledThreads, 2)
    scaled_activation_kernel(const __grid_constant__ ActivationParams params) {
  __shared__ float scratch[32];
  const int64_t token = blockIdx.x;
  const int64_t size = params.intermediate_size;
  const T* gate = static_cast<const T*>(params.input) + token * params.input_stride_token;
  const T* up = gate + size;
  T* out = static_cast<T*>(params.out) + token * params.out_stride_token;
  const int64_t step = static_cast<int64_t>(blockDim.x) * kVec;
  Vec<T, kVec> gates[kScaledItems];
  Vec<T, kVec> ups[kScaledItems];
  const auto load = [&](int64_t first) {
#pragma unroll
    for (int item = 0; item < kScaledItems; ++item) {
      const int64_t at = first + item * step;
      if (at >= size) continue;
      gates[item] = load_vec<kVec>(gate + at);
      ups[item] = load_vec<kVec>(up + at);
    }
  };
  int64_t first = static_cast<int64_t>(threadIdx.x) * kVec;
  load(first);
  const float scale =
      row_scale<kVec>(params.scales, std::type_identity<T>{}, token, static_cast<int>(threadIdx.x),
                      static_cast<int>(blockDim.x), scratch);
  while (first < size) {
#pragma unroll
    for (int item = 0; item < kScaledItems; ++item) {
      const int64_t at = first + item * step;
      if (at >= size) continue;
      Vec<float, kVec> x = widen(gates[item]);
      const Vec<float, kVec> y = widen(ups[item]);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        x.data[i] = activate<kActivation, T>(x.data[i] * scale) * (y.data[i] * scale);
      }
      store_global<kVec>(out + at, narrow<T>(x));
    }
    first += kScaledItems * step;
    load(first);
  }
}

template <Activation kActivation>
void launch_as(const ActivationParams& params, cudaStream_t stream) {
  with_activation_type(params.type, [&]<class T>(std::type_identity<T>) {
    constexpr int kWide = kVecElements<T>;
    constexpr int64_t kElement = sizeof(T);
    const bool wide =
        params.intermediate_size % kWide == 0 &&
        aligned_to(16, {params.out, params.input},
                   {params.out_stride_token * kElement, params.input_stride_token * kElement}) &&
        scales_fit_vectors<T>(params.scales);
    const int64_t vecs = params.intermediate_size / (wide ? kWide : 1);
    if (params.scales.rows != nullptr) {
      const int64_t warps = ceil_div(ceil_div(vecs, kScaledItems), 32);
      const auto threads = static_cast<unsigned>(min(32 * warps, int64_t{kScaledThreads}));
      const auto kernel = wide ? scaled_activation_kernel<T, kActivation, kWide>
                               : scaled_activation_kernel<T, kActivation, 1>;
      kernel<<<grid_size(params.num_tokens), threads, 0, stream>>>(params);
      return;
    }
    const dim3 grid(grid_size(params.num_tokens),
                    static_cast<unsigned>(ceil_div(vecs, kThreads * kItems)));
    if (wide) {
      activation_kernel<T, kActivation, kWide><<<grid, kThreads, 0, stream>>>(params);
    } else {
      activation_kernel<T, kActivation, 1><<<grid, kThreads, 0, stream>>>(params);
    }
  });
}

}  // namespace

void launch_activation(const ActivationParams& params, StreamHandle stream) {
  if (params.num_tokens == 0 || params.intermediate_size == 0) return;
  const auto at = static_cast<cudaStream_t>(stream);
  switch (params.activation) {
    case Activation::kSilu:
      launch_as<Activation::kSilu>(params, at);
      break;
    case Activation::kGelu:
      launch_as<Activation::kGelu>(params, at);
      break;
    case Activation::kGeluTanh:
      launch_as<Activation::kGeluTanh>(params, at);
      break;
    default:
      throw std::runtime_error("pagedkv: no CUDA kernel for activation " +
                               std::to_string(static_cast<int>(params.activation)));
  }
  check_launch("activation");
}

}  // namespace pagedkv::cuda
