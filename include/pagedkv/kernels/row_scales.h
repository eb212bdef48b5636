// The RMS norm of a projection's input, applied to its result instead: with the norm's weights
// folded into the projection's, rms_norm(x) @ W.T is x @ W.T with row t multiplied by
// 1 / sqrt(mean(x[t]^2) + epsilon).
#pragma once

#include <cstdint>

namespace pagedkv {

struct RowScales {
  const void* rows;     // x [T, hidden], of the result's type; null: rows are not multiplied
  int64_t hidden_size;  // hidden
  int64_t stride_token;
  float epsilon;
};

// What queries, keys and values that are a projection's bare result get first, each token's the
// scale of its row and then the bias. In fused_rotary_reshape_and_cache it comes before the norms.
struct BareProjection {
  RowScales scales;
  const void* bias;  // [(H + 2 G) * D] their type, queries', keys', values'; null: none

  // Whether there is anything to do.
  constexpr bool is_bare() const { return scales.rows != nullptr || bias != nullptr; }
};

}  // namespace pagedkv
