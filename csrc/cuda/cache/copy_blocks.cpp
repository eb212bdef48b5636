// copy_blocks: copies within one pool, all layers in one launch (see move_blocks.h).
#include "cuda/cache/move_blocks.h"
#include "pagedkv/kernels/cuda_launchers.h"

namespace pagedkv::cuda {

void launch_copy_blocks(const CopyBlocksParams& params, StreamHandle stream) {
  launch_move_blocks(
      {.source = params.pool.data,
       .destination = params.pool.data,
       .pairs = params.pairs,
       .num_pairs = params.num_pairs,
       .geometry = block_geometry(params.pool, params.pool, params.num_layers, params.num_kv_heads,
                                  params.block_size, params.head_dim, params.element_bytes),
       .same_pool = true,
       .max_blocks = 0},
      static_cast<cudaStream_t>(stream));
}

}  // namespace pagedkv::cuda
