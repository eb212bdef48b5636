// The second kernel of score_tokens: log-probabilities and ranks of given tokens, and the most
// likely ones, from the largest logit and the sum of weights of each chunk.
//
// Grid: a block a row. It reads the chunks that have larger logits than the token's, and those with
// the most likely ones. Instantiations: 3 types.
#include "cuda/sampling/scan_logits.h"
#include "cuda/sampling/select.cuh"

namespace pagedkv::cuda {
namespace {

// Tokens that may be among the best: those above the least of them, and of its equals at least as
// many as are wanted, from chunks in their order. In the list's memory.
constexpr int kMostBest = static_cast<int>(kMaxTopTokens) - 1 + kChunk;
static_assert(2 * kMostBest <= kListed);

// Number of the row's logits above `key`, in all threads.
template <class Row>
__device__ int64_t count_above(const Row& row, int key) {
  Mass count = 0;
  row.for_each_chunk(key + 1, [&](int, const float (&x)[kLaneLogits]) {
#pragma unroll
    for (int i = 0; i < kLaneLogits; ++i) count += row.key(x[i]) > key;
  });
  return static_cast<int64_t>(block_total(count, row.shared));
}

// Of this warp's chunk, ids whose key is in [low, high) to the end of the list.
template <class T>
__device__ void list_ids(const PickRow<T>& row, int chunk, const float (&x)[kLaneLogits], int low,
                         int high) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < kLaneLogits; ++i) {
    const int key = row.key(x[i]);
    const int id = chunk * kChunk + LogitRow<T>::place_of(lane, i);
    // What is read beyond the vocabulary is no token.
    if (key < low || key >= high || id >= row.logits.vocab_size) continue;
    const int place = atomicAdd(&row.shared.num_listed, 1);
    row.shared.list[place] = key;
    row.shared.list[kMostBest + place] = id;
  }
}

// body(place, id, key) for each of the num_top best, by one thread each.
template <class T, class Body>
__device__ void for_each_best(const PickRow<T>& row, int num_top, const Body& body) {
  PickShared& shared = row.shared;
  const int least = kth_largest(row, num_top);
  __syncthreads();
  if (threadIdx.x == 0) shared.num_listed = 0;
  __syncthreads();
  row.for_each_chunk(least + 1, [&](int chunk, const float (&x)[kLaneLogits]) {
    list_ids(row, chunk, x, least + 1, INT_MAX);
  });
  __syncthreads();
  if (threadIdx.x < 32) {
    for (int chunk = 0; chunk < row.num_chunks; ++chunk) {
      __syncwarp();
      const int count = *static_cast<volatile int*>(&shared.num_listed);
      __syncwarp();
      if (count >= num_top) break;
      if (row.chunk_keys[chunk] < least) continue;
      float x[kLaneLogits];
      row.logits.read(chunk, x);
      list_ids(row, chunk, x, least, least + 1);
    }
  }
  __syncthreads();
  const int num_listed = shared.num_listed;
  for (int at = static_cast<int>(threadIdx.x); at < num_listed; at += kPickThreads) {
    const int key = shared.list[at];
    const int id = shared.list[kMostBest + at];
    int place = 0;
    for (int other = 0; other < num_listed; ++other) {
      const int other_key = shared.list[other];
      place += other_key > key || (other_key == key && shared.list[kMostBest + other] < id);
    }
    if (place < num_top) body(place, id, key);
  }
}

template <class T>
__global__ void __launch_bounds__(kPickThreads, 2)
    score_tokens_kernel(const __grid_constant__ ScoreTokensParams params) {
  begin_overlapped_kernel();
  extern __shared__ __align__(16) unsigned char memory[];
  const int64_t row_index = blockIdx.x;
  const float2* stats = chunk_stats(params.rows, row_index);
  constexpr int kSpare = kSpareBits<T>;
  const PickMemory found(memory, params.rows);
  const int largest_key = found.load_keys(stats, kSpare);
  const float largest = value_of(largest_key);
  int64_t* top_ids = params.top_ids + row_index * params.top_ids_stride_row;
  double* top_logprobs = params.top_logprobs + row_index * params.top_logprobs_stride_row;
  const int num_top = static_cast<int>(params.num_top);
  if (!isfinite(largest)) {
    if (threadIdx.x == 0) params.logprobs[row_index] = NAN;
    if (threadIdx.x == 0) params.ranks[row_index] = 0;
    for (int i = static_cast<int>(threadIdx.x); i < num_top; i += kPickThreads) {
      top_ids[i] = -1;
      top_logprobs[i] = NAN;
    }
    return;
  }
  const PickRow<T> row{.logits = LogitRow<T>(params.rows, row_index),
                       .num_chunks = found.num_chunks,
                       .spare = kSpare,
                       .scale = kLog2E,
                       .largest = largest,
                       .largest_key = largest_key >> kSpare,
                       .chunk_keys = found.chunk_keys,
                       .chunk_masses = found.chunk_masses,
                       .active_chunks = found.active_chunks,
                       .shared = found.shared};
  const double total = static_cast<double>(row.load_masses(stats)) * 0x1p-40;
  const double log_sum = largest + log(total);
  const int64_t token_id = params.token_ids[row_index];
  float own = -INFINITY;
  if (0 <= token_id && token_id < params.rows.vocab_size)
    own = to_float(row.logits.logits[token_id]);
  const int64_t above = count_above(row, row.key(own));
  if (threadIdx.x == 0) {
    params.logprobs[row_index] = own - log_sum;
    params.ranks[row_index] = 1 + above;
  }
  if (num_top == 0) return;
  for_each_best(row, num_top, [&](int place, int id, int key) {
    top_ids[place] = id;
    top_logprobs[place] = row.value(key) - log_sum;
  });
}

}  // namespace

void launch_score_tokens(const ScoreTokensParams& params, StreamHandle stream) {
  if (params.rows.num_rows == 0) return;
  launch_scan_logits(params.rows, nullptr, stream);
  with_activation_type(params.rows.type, [&]<class T>(std::type_identity<T>) {
    launch_by_rows("score_tokens", score_tokens_kernel<T>, params.rows, stream, params);
  });
}

}  // namespace pagedkv::cuda
