// Params of the kernels that move keys and values between activations, blocks and pools.
// Passed by value, filled by name. Pointers are borrowed for the call; nothing here owns memory.
//
// Words: T tokens, S sequences, G key/value heads, D head_dim, B block_size, N num_blocks,
// L layers. Strides count elements, never bytes, in 64 bits; the last dimension has stride 1.
//
// Invariants that the adapters (csrc/ops) have checked before a launcher sees a struct:
//   1. every size is >= 0, and block_size, head_dim, num_kv_heads are >= 1;
//   2. a cache's type is its activations' type or a float8, and scales come exactly with float8;
//   3. on the CPU every slot and block id that is followed lies inside the cache.
#pragma once

#include <cstdint>

#include "pagedkv/kernels/element_type.h"

namespace pagedkv {

// One layer's keys and values, as views of the pool. Pointer is void* or const void*.
template <class Pointer>
struct KvCacheView {
  Pointer key;           // [num_blocks, num_kv_heads, block_size, head_dim] type
  Pointer value;         // [num_blocks, num_kv_heads, block_size, head_dim] type
  const float* k_scale;  // fp32 [1] or [num_kv_heads]; null: 1. stored * scale = real
  const float* v_scale;  // fp32 [1] or [num_kv_heads]; null: 1
  ElementType type;      // of key and value
  int64_t num_blocks;    // N
  int64_t num_kv_heads;  // G
  int64_t block_size;    // B, tokens
  int64_t head_dim;      // D
  int64_t key_stride_block;
  int64_t key_stride_head;
  int64_t key_stride_token;
  int64_t value_stride_block;
  int64_t value_stride_head;
  int64_t value_stride_token;
  int64_t k_scale_stride;  // elements between heads; 0: one scale for all
  int64_t v_scale_stride;
};

using KvCache = KvCacheView<void*>;
using ConstKvCache = KvCacheView<const void*>;

// Row t of key and value goes to slot_mapping[t] = block_id * B + offset; a negative slot writes
// nothing. Into a float8 cache goes real / scale, rounded to nearest even and saturated.
struct ReshapeAndCacheParams {
  const void* key;              // [T', G, D] type, T' >= T
  const void* value;            // [T', G, D] type
  const int64_t* slot_mapping;  // int64 [T]
  KvCache cache;
  ElementType type;    // of key and value
  int64_t num_tokens;  // T
  int64_t key_stride_token;
  int64_t key_stride_head;
  int64_t value_stride_token;
  int64_t value_stride_head;
};

// ReshapeAndCacheParams of keys that are rotated first (RotaryEmbeddingParams says how), and the
// queries rotated in place. Keys are rounded to type before they go on, so that the result is that
// of the two ops; key itself stays as it is. T' = T.
struct FusedRotaryReshapeAndCacheParams {
  ReshapeAndCacheParams write;
  const int64_t* positions;    // int64 [T]
  void* query;                 // [T, H, D] write.type
  const float* cos_sin_cache;  // fp32 [max_position, rotary_dim]
  bool is_neox;
  int64_t num_heads;   // H
  int64_t rotary_dim;  // even, <= D
  int64_t max_position;
  int64_t query_stride_token;
  int64_t query_stride_head;
  int64_t cos_sin_stride;  // elements between positions
  // Weights of the RMS norms of every query head and every key head, [D] write.type, which come
  // before the rotation and are rounded as rms_norm's results; both null: no norms.
  const void* query_norm;
  const void* key_norm;
  float epsilon;
};

// Row seq_start_loc[i] + j of key and value becomes token j of sequence i, real values
// (stored * scale), for 0 <= j < seq_start_loc[i + 1] - seq_start_loc[i].
struct GatherBlocksParams {
  void* key;                     // [T, G, D] type
  void* value;                   // [T, G, D] type
  const int32_t* block_tables;   // int32 [S, max_num_blocks], last stride 1
  const int32_t* seq_start_loc;  // int32 [S + 1]
  ConstKvCache cache;
  ElementType type;    // of key and value
  int64_t num_tokens;  // T
  int64_t num_seqs;    // S
  int64_t max_num_blocks;
  int64_t block_tables_stride;  // elements between sequences
  int64_t key_stride_token;
  int64_t key_stride_head;
  int64_t value_stride_token;
  int64_t value_stride_head;
};

// A whole pool: all layers, keys (index 0) and values (index 1). Pointer is void* or const void*.
template <class Pointer>
struct KvPoolView {
  Pointer data;        // [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]
  int64_t num_blocks;  // N; the other sizes stand in the params
  int64_t stride_layer;
  int64_t stride_kv;  // between a layer's keys and its values
  int64_t stride_block;
  int64_t stride_head;
  int64_t stride_token;
};

using KvPool = KvPoolView<void*>;
using ConstKvPool = KvPoolView<const void*>;

// pairs[i] = (source block, destination block), in all layers. The effect is that of running the
// pairs one after another, in order.
struct CopyBlocksParams {
  KvPool pool;
  const int64_t* pairs;  // int64 [num_pairs, 2], contiguous, in CPU memory on every device
  int64_t num_pairs;
  int64_t num_layers;     // L
  int64_t num_kv_heads;   // G
  int64_t block_size;     // B
  int64_t head_dim;       // D
  int64_t element_bytes;  // bytes are moved as they are
};

// As CopyBlocksParams, from one pool into another one, in other memory or in the same.
struct SwapBlocksParams {
  ConstKvPool source;
  KvPool destination;
  const int64_t* pairs;  // int64 [num_pairs, 2], contiguous, in CPU memory on every device
  int64_t num_pairs;
  int64_t num_layers;    // L
  int64_t num_kv_heads;  // G
  int64_t block_size;    // B
  int64_t head_dim;      // D
  int64_t element_bytes;
};

}  // namespace pagedkv
