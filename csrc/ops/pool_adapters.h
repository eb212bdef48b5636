// From tensors to params for the ops that move whole blocks of all layers: copy_blocks and
// swap_blocks. Used by the CPU and the CUDA adapter alike. The pairs are in CPU memory on every
// device, so their ids are checked here.
#pragma once

#include "ops/cache_adapters.h"
#include "ops/operand_checks.h"
#include "pagedkv/kernels/cache_params.h"

namespace pagedkv::ops {

template <class Pointer>
KvPoolView<Pointer> pool_view(const Tensor& pool) {
  return {.data = const_cast<void*>(pool.const_data_ptr()),
          .num_blocks = pool.size(2),
          .stride_layer = pool.stride(0),
          .stride_kv = pool.stride(1),
          .stride_block = pool.stride(2),
          .stride_head = pool.stride(3),
          .stride_token = pool.stride(4)};
}

// Dtype and layout of the pairs, and that their ids lie inside the pools.
inline void check_pairs(const OperandChecks& check, const Tensor& pairs, int64_t num_source_blocks,
                        int64_t num_destination_blocks) {
  const int64_t* ids = pairs.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < pairs.size(0); ++i) {
    STD_TORCH_CHECK(0 <= ids[2 * i] && ids[2 * i] < num_source_blocks, check.op(), ": pairs[", i,
                    "] has source block ", ids[2 * i], ", expected 0 to ", num_source_blocks - 1);
    STD_TORCH_CHECK(0 <= ids[2 * i + 1] && ids[2 * i + 1] < num_destination_blocks, check.op(),
                    ": pairs[", i, "] has destination block ", ids[2 * i + 1], ", expected 0 to ",
                    num_destination_blocks - 1);
  }
}

inline CopyBlocksParams copy_blocks_params(const Tensor& kv_cache, const Tensor& pairs) {
  const OperandChecks check("pagedkv::copy_blocks");
  const Operand pool{"kv_cache", kv_cache};
  check.on_cpu({"pairs", pairs});
  const ElementType type = check.cache_type(pool);
  check.dtypes(ScalarType::Long, {{"pairs", pairs}});
  check.written_rows(pool, kPoolForm);
  check.contiguous({"pairs", pairs}, kPairsForm);
  check.shape(pool, {kAnySize, 2, kAnySize, kAnySize, kAnySize, kAnySize}, kPoolForm);
  check.shape({"pairs", pairs}, {kAnySize, 2}, kPairsForm);
  check.apart(pool, {{"pairs", pairs}});
  check_pairs(check, pairs, kv_cache.size(2), kv_cache.size(2));
  return {.pool = pool_view<void*>(kv_cache),
          .pairs = pairs.const_data_ptr<int64_t>(),
          .num_pairs = pairs.size(0),
          .num_layers = kv_cache.size(0),
          .num_kv_heads = kv_cache.size(3),
          .block_size = kv_cache.size(4),
          .head_dim = kv_cache.size(5),
          .element_bytes = element_bytes(type)};
}

// Where source and destination may be is the adapter's to check.
inline SwapBlocksParams swap_blocks_params(const Tensor& source, const Tensor& destination,
                                           const Tensor& pairs) {
  const OperandChecks check("pagedkv::swap_blocks");
  const Operand from{"source", source};
  const Operand to{"destination", destination};
  check.on_cpu({"pairs", pairs});
  const ElementType type = check.cache_type(from);
  check.same_dtype(from, {to});
  check.dtypes(ScalarType::Long, {{"pairs", pairs}});
  check.rows(from, kPoolForm);
  check.written_rows(to, kPoolForm);
  check.contiguous({"pairs", pairs}, kPairsForm);
  check.shape(from, {kAnySize, 2, kAnySize, kAnySize, kAnySize, kAnySize}, kPoolForm);
  check.shape(to, {source.size(0), 2, kAnySize, source.size(3), source.size(4), source.size(5)},
              "source's shape with any num_blocks");
  check.shape({"pairs", pairs}, {kAnySize, 2}, kPairsForm);
  check.apart(to, {from, {"pairs", pairs}});
  check_pairs(check, pairs, source.size(2), destination.size(2));
  return {.source = pool_view<const void*>(source),
          .destination = pool_view<void*>(destination),
          .pairs = pairs.const_data_ptr<int64_t>(),
          .num_pairs = pairs.size(0),
          .num_layers = source.size(0),
          .num_kv_heads = source.size(3),
          .block_size = source.size(4),
          .head_dim = source.size(5),
          .element_bytes = element_bytes(type)};
}

}  // namespace pagedkv::ops
