// swap_blocks: blocks between a pool on the device and one in CPU memory (or two pools on the
// device), in stream order. Three ways, by what the memory allows:
//   * long runs to or from pinned memory: one batch of DMA copies, which leave the multiprocessors
//     to the model; the link's rate is the floor;
//   * short runs, the legacy default stream, or a stream under capture: the move kernel reads or
//     writes pinned memory directly, with few enough blocks of threads to leave room for others;
//   * memory that is not pinned: one copy a run, which CUDA stages itself.
#include <vector>

#include "cuda/cache/move_blocks.h"
#include "cuda/device/launch.h"
#include "pagedkv/kernels/cuda_launchers.h"

namespace pagedkv::cuda {
namespace {

// Below it a copy's own cost shows: on an H200, runs of 32 KB reach 22 GB/s by DMA and 50 GB/s by
// the kernel, runs of 1 MB 52 GB/s by DMA.
constexpr int64_t kMinDmaRunBytes = 256 * 1024;
constexpr int64_t kMoveBlocks = 96;  // of threads, enough to fill the link

enum class Memory { kDevice, kPinned, kPageable };

Memory memory_of(const void* pointer) {
  cudaPointerAttributes attributes{};
  check_cuda(cudaPointerGetAttributes(&attributes, pointer), "cudaPointerGetAttributes");
  if (attributes.type == cudaMemoryTypeUnregistered) return Memory::kPageable;
  if (attributes.type == cudaMemoryTypeHost) return Memory::kPinned;
  return Memory::kDevice;
}

struct Run {
  const char* source;
  char* destination;
};

// Calls body(run) for every contiguous run of every pair, pairs in order.
template <class Body>
void for_each_run(const SwapBlocksParams& params, const BlockGeometry& g, const Body& body) {
  for (int64_t pair = 0; pair < params.num_pairs; ++pair) {
    const char* source = static_cast<const char*>(params.source.data) +
                         params.pairs[2 * pair] * g.source_block_stride;
    char* destination = static_cast<char*>(params.destination.data) +
                        params.pairs[2 * pair + 1] * g.destination_block_stride;
    for (int64_t index = 0; index < g.num_runs(); ++index) {
      Run run{source, destination};
      int64_t rest = index;
      for (int i = 0; i < kBlockDims; ++i) {
        run.source += rest % g.sizes[i] * g.source_strides[i];
        run.destination += rest % g.sizes[i] * g.destination_strides[i];
        rest /= g.sizes[i];
      }
      body(run);
    }
  }
}

void enqueue_batch(const SwapBlocksParams& params, const BlockGeometry& g, cudaStream_t stream) {
  std::vector<const void*> sources;
  std::vector<void*> destinations;
  sources.reserve(params.num_pairs * g.num_runs());
  destinations.reserve(params.num_pairs * g.num_runs());
  for_each_run(params, g, [&](const Run& run) {
    sources.push_back(run.source);
    destinations.push_back(run.destination);
  });
  std::vector<size_t> sizes(sources.size(), static_cast<size_t>(g.run_bytes));
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
  size_t first = 0;
  check_cuda(cudaMemcpyBatchAsync(destinations.data(), sources.data(), sizes.data(), sizes.size(),
                                  &attributes, &first, 1, stream),
             "swap_blocks: cudaMemcpyBatchAsync");
}

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status{};
  check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace

void launch_swap_blocks(const SwapBlocksParams& params, StreamHandle handle) {
  const auto stream = static_cast<cudaStream_t>(handle);
  if (params.num_pairs == 0) return;
  const BlockGeometry geometry =
      block_geometry(params.source, params.destination, params.num_layers, params.num_kv_heads,
                     params.block_size, params.head_dim, params.element_bytes);
  if (geometry.run_bytes == 0 || geometry.num_runs() == 0) return;
  const Memory from = memory_of(params.source.data);
  const Memory to = memory_of(params.destination.data);
  if (from == Memory::kPageable || to == Memory::kPageable) {
    for_each_run(params, geometry, [&](const Run& run) {
      check_cuda(cudaMemcpyAsync(run.destination, run.source, geometry.run_bytes, cudaMemcpyDefault,
                                 stream),
                 "swap_blocks: cudaMemcpyAsync");
    });
    return;
  }
  const bool same_pool = params.source.data == params.destination.data;
  const bool on_device = from == Memory::kDevice && to == Memory::kDevice;
  const bool batch = !on_device && geometry.run_bytes >= kMinDmaRunBytes && stream != nullptr &&
                     !is_capturing(stream) &&
                     !pairs_depend(params.pairs, params.num_pairs, same_pool);
  if (batch) return enqueue_batch(params, geometry, stream);
  launch_move_blocks({.source = params.source.data,
                      .destination = params.destination.data,
                      .pairs = params.pairs,
                      .num_pairs = params.num_pairs,
                      .geometry = geometry,
                      .same_pool = same_pool,
                      .max_blocks = on_device ? 0 : kMoveBlocks},
                     stream);
}

}  // namespace pagedkv::cuda
