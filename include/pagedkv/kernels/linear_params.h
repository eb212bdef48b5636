// Params of the product of a few rows with a weight matrix, and of what a decoder layer does before
// and behind it. Sums are fp32. Strides count elements; last dimensions have stride 1.
#pragma once

#include <cstdint>

#include "pagedkv/kernels/element_type.h"

namespace pagedkv {

// What becomes of y = x weight^T + bias, rounded to type, x being input or its RMS norm.
enum class LinearEpilogue : int8_t {
  kStore,       // out = y
  kAdd,         // out = out + y
  kSiluAndMul,  // out = silu(left half of y) * right half
};

struct StreamedLinearParams {
  void* out;                // [T, N], [T, N / 2] for kSiluAndMul; type
  const void* input;        // [T, K] type
  const void* weight;       // [N, K] type
  const void* bias;         // [N] type, or null
  const void* norm_weight;  // [K] type, or null: no norm
  ElementType type;
  LinearEpilogue epilogue;
  int64_t num_tokens;    // T
  int64_t in_features;   // K
  int64_t out_features;  // N
  int64_t out_stride_token;
  int64_t input_stride_token;
  int64_t weight_stride_row;
  float epsilon;  // of the norm
};

}  // namespace pagedkv
