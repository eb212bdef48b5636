// copy_blocks and swap_blocks on the CPU: bytes of whole blocks, moved within one pool or between
// two. Layers, sides and heads are independent; the pairs run in order within each of them, so a
// later pair sees what an earlier one wrote. Reads and writes num_pairs * L * 2 * G * B * D
// elements.
#include <cstring>

#include "pagedkv/kernels/cpu_launchers.h"

namespace pagedkv::cpu {
namespace {

// A block of one layer, side and head: [block_size, head_dim], rows stride_token apart.
struct BlockShape {
  int64_t num_layers;
  int64_t num_kv_heads;
  int64_t block_size;
  int64_t head_dim;
  int64_t element_bytes;
};

// memmove, as a block may be copied onto itself.
void move_block(char* to, int64_t to_stride, const char* from, int64_t from_stride,
                const BlockShape& shape) {
  const int64_t row = shape.head_dim * shape.element_bytes;
  if (to_stride == shape.head_dim && from_stride == shape.head_dim) {
    std::memmove(to, from, static_cast<size_t>(row * shape.block_size));
    return;
  }
  for (int64_t i = 0; i < shape.block_size; ++i) {
    std::memmove(to + i * to_stride * shape.element_bytes,
                 from + i * from_stride * shape.element_bytes, static_cast<size_t>(row));
  }
}

void move_blocks(const ConstKvPool& source, const KvPool& destination, const int64_t* pairs,
                 int64_t num_pairs, const BlockShape& shape, const ThreadPool& pool) {
  if (shape.num_kv_heads == 0 || shape.block_size == 0 || shape.head_dim == 0) return;
  constexpr int64_t kGrainBytes = 65536;
  const int64_t item_bytes =
      num_pairs * shape.block_size * shape.head_dim * shape.element_bytes + 1;
  const int64_t items = shape.num_layers * 2 * shape.num_kv_heads;
  const int64_t grain = (kGrainBytes + item_bytes - 1) / item_bytes;
  parallel_for(pool, 0, items, grain, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t head = item % shape.num_kv_heads;
      const int64_t side = item / shape.num_kv_heads % 2;
      const int64_t layer = item / shape.num_kv_heads / 2;
      const auto base = [&](const auto& view) {
        return layer * view.stride_layer + side * view.stride_kv + head * view.stride_head;
      };
      const char* from = static_cast<const char*>(source.data) + base(source) * shape.element_bytes;
      char* to = static_cast<char*>(destination.data) + base(destination) * shape.element_bytes;
      for (int64_t i = 0; i < num_pairs; ++i) {
        move_block(to + pairs[2 * i + 1] * destination.stride_block * shape.element_bytes,
                   destination.stride_token,
                   from + pairs[2 * i] * source.stride_block * shape.element_bytes,
                   source.stride_token, shape);
      }
    }
  });
}

}  // namespace

void launch_copy_blocks(const CopyBlocksParams& params, const ThreadPool& pool) {
  const KvPool& kv = params.pool;
  const ConstKvPool source{.data = kv.data,
                           .num_blocks = kv.num_blocks,
                           .stride_layer = kv.stride_layer,
                           .stride_kv = kv.stride_kv,
                           .stride_block = kv.stride_block,
                           .stride_head = kv.stride_head,
                           .stride_token = kv.stride_token};
  move_blocks(source, kv, params.pairs, params.num_pairs,
              {.num_layers = params.num_layers,
               .num_kv_heads = params.num_kv_heads,
               .block_size = params.block_size,
               .head_dim = params.head_dim,
               .element_bytes = params.element_bytes},
              pool);
}

void launch_swap_blocks(const SwapBlocksParams& params, const ThreadPool& pool) {
  move_blocks(params.source, params.destination, params.pairs, params.num_pairs,
              {.num_layers = params.num_layers,
               .num_kv_heads = params.num_kv_heads,
               .block_size = params.block_size,
               .head_dim = params.head_dim,
               .element_bytes = params.element_bytes},
              pool);
}

}  // namespace pagedkv::cpu
