// Params of the small layers: RMS norm (with fused residual add), rotary embedding, gated
// activations. All arithmetic is fp32 inside. Strides count elements; last dimensions have
// stride 1.
#pragma once

#include <cstdint>

#include "pagedkv/kernels/element_type.h"
#include "pagedkv/kernels/row_scales.h"

namespace pagedkv {

// out = input / sqrt(mean(input^2) + epsilon) * weight. out may be input.
struct RmsNormParams {
  void* out;           // [T, hidden] type
  const void* input;   // [T, hidden] type
  const void* weight;  // [hidden] type
  ElementType type;
  int64_t num_tokens;   // T
  int64_t hidden_size;  // hidden
  int64_t out_stride_token;
  int64_t input_stride_token;
  float epsilon;
};

// residual <- residual + input (rounded to type); input <- rms_norm(residual).
struct FusedAddRmsNormParams {
  void* input;         // [T, hidden] type
  void* residual;      // [T, hidden] type
  const void* weight;  // [hidden] type
  ElementType type;
  int64_t num_tokens;   // T
  int64_t hidden_size;  // hidden
  int64_t input_stride_token;
  int64_t residual_stride_token;
  float epsilon;
};

// Rotates the first rotary_dim elements of every head, in place. With r = rotary_dim / 2,
// c = cos_sin_cache[position, i], s = cos_sin_cache[position, r + i], the pair (x, y) becomes
// (x c - y s, y c + x s); the pair is elements (i, i + r) when is_neox, else (2i, 2i + 1).
struct RotaryEmbeddingParams {
  const int64_t* positions;    // int64 [T]
  void* query;                 // [T, H, D] type
  void* key;                   // [T, G, D] type
  const float* cos_sin_cache;  // fp32 [max_position, rotary_dim]
  ElementType type;
  bool is_neox;
  int64_t num_tokens;    // T
  int64_t num_heads;     // H
  int64_t num_kv_heads;  // G
  int64_t head_dim;      // D
  int64_t rotary_dim;    // even, <= D
  int64_t max_position;
  int64_t query_stride_token;
  int64_t query_stride_head;
  int64_t key_stride_token;
  int64_t key_stride_head;
  int64_t cos_sin_stride;  // elements between positions
};

enum class Activation : int8_t { kSilu, kGelu, kGeluTanh };

// out = act(input[:, :F]) * input[:, F:], of input's rows multiplied by their scales.
struct ActivationParams {
  void* out;          // [T, F] type
  const void* input;  // [T, 2 F] type
  ElementType type;
  Activation activation;
  int64_t num_tokens;         // T
  int64_t intermediate_size;  // F
  int64_t out_stride_token;
  int64_t input_stride_token;
  RowScales scales;
};

// heads <- heads times their token's scale, plus bias; rounded to type. For the CPU: on a GPU the
// kernels that read heads do this as they read.
struct ScaleHeadsParams {
  void* heads;       // [T, H, D] type
  const void* bias;  // [H * D] type; null: none
  RowScales scales;
  ElementType type;
  int64_t num_tokens;  // T
  int64_t num_heads;   // H
  int64_t head_dim;    // D
  int64_t stride_token;
  int64_t stride_head;
};

}  // namespace pagedkv
