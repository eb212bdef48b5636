// advance_step: from what the device keeps of the running sequences to the inputs of one step.
//
// Grid: one block for one row, of a decode mostly one token; rows share nothing, as a slot is in
// one row at most. Must move 4 bytes of each entry of each row's table in and out, 24 bytes a
// token and 60 a sample. No instantiations.
#include "cuda/device/launch.h"
#include "pagedkv/kernels/step_launchers.h"

namespace pagedkv::cuda {
namespace {

constexpr unsigned kThreads = 128;

__device__ void write_padding(const AdvanceStepParams& p, int64_t row) {
  if (threadIdx.x == 0) p.seq_lens[row] = 0;
  for (int64_t t = p.query_start_loc[row] + threadIdx.x; t < p.query_start_loc[row + 1];
       t += kThreads) {
    p.input_ids[t] = p.positions[t] = 0;
    p.slot_mapping[t] = -1;
  }
  for (int64_t s = p.sample_start_loc[row] + threadIdx.x; s < p.sample_start_loc[row + 1];
       s += kThreads) {
    p.logit_rows[s] = p.top_k[s] = p.seeds[s] = p.sample_positions[s] = p.sample_draws[s] = 0;
    p.sample_slots[s] = p.num_slots;
    p.top_p[s] = 1.0;
    p.min_p[s] = 0.0;
    p.inverse_temperatures[s] = 0.0f;
  }
}

__global__ void __launch_bounds__(kThreads)
    advance_step_kernel(const __grid_constant__ AdvanceStepParams p) {
  const int64_t row = blockIdx.x;
  if (row >= p.counts[0]) return write_padding(p, row);
  const int64_t slot = p.slots[row];
  const int64_t begin = p.query_start_loc[row];
  const int64_t end = p.query_start_loc[row + 1];
  const int32_t first = p.lens[slot];
  const int32_t len = first + static_cast<int32_t>(end - begin);
  __syncthreads();  // all have read it
  if (threadIdx.x == 0) p.lens[slot] = p.seq_lens[row] = len;

  const int32_t* table = p.tables + slot * p.max_num_blocks;
  int32_t* block_table = p.block_tables + row * p.block_tables_stride;
  const auto block_size = static_cast<int32_t>(p.block_size);
  const int32_t num_blocks = static_cast<int32_t>(ceil_div(len, block_size));
#pragma unroll 8
  for (int32_t i = threadIdx.x; i < num_blocks; i += kThreads) block_table[i] = table[i];

  const int64_t num_pending = p.counts[1];
  for (int64_t t = begin + threadIdx.x; t < end; t += kThreads) {
    const int32_t id = t < num_pending ? kPendingTokenId : p.token_ids[t - num_pending];
    const int32_t position = first + static_cast<int32_t>(t - begin);
    p.input_ids[t] = id == kPendingTokenId ? p.latest[slot] : id;
    p.positions[t] = position;
    p.slot_mapping[t] = int64_t{table[position / block_size]} * block_size + position % block_size;
  }

  const int64_t first_sample = p.sample_start_loc[row];
  for (int64_t s = first_sample + threadIdx.x; s < p.sample_start_loc[row + 1]; s += kThreads) {
    const DrawParams drawn = p.params[slot];
    p.logit_rows[s] = end - 1;
    p.sample_slots[s] = slot;
    p.top_k[s] = drawn.top_k;
    p.seeds[s] = drawn.seed;
    p.sample_positions[s] = len;
    p.sample_draws[s] = p.draws[slot] + s - first_sample;
    p.top_p[s] = drawn.top_p;
    p.min_p[s] = drawn.min_p;
    p.inverse_temperatures[s] = drawn.inverse_temperature;
  }
}

}  // namespace

void launch_advance_step(const AdvanceStepParams& params, void* stream) {
  if (params.num_rows == 0) return;
  advance_step_kernel<<<grid_size(params.num_rows), kThreads, 0,
                        static_cast<cudaStream_t>(stream)>>>(params);
  check_launch("advance_step");
}

}  // namespace pagedkv::cuda
