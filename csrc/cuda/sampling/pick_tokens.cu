// The second kernel of sample_tokens: from the largest logit and the sum of weights of each chunk
// to the token of each row.
//
// Grid: a block a row. A greedy row reads one chunk, so does a draw without filters. top_k and
// top_p read the chunks that have candidates, some a few times, all of them where most of the row
// stays. Instantiations: 3 types.
#include "cuda/device/overlapped_launch.cuh"
#include "cuda/sampling/scan_logits.h"
#include "cuda/sampling/select.cuh"
#include "pagedkv/kernels/philox.h"

namespace pagedkv::cuda {
namespace {

// The options of one row.
struct RowOptions {
  float inverse_temperature;
  int64_t top_k;
  double top_p;
  double min_p;
};

// The lowest key, up to the row's largest, whose value v has (v - largest) * factor >= limit, which
// is not above 0. In all threads; each warp looks for itself.
template <class Row>
__device__ int lowest_key_within(const Row& row, float factor, float limit) {
  const unsigned lane = threadIdx.x % 32;
  int low = row.key(-INFINITY);
  int high = row.largest_key;  // it is within the limit, those before low are not
  while (low < high) {
    const unsigned width = static_cast<unsigned>(high) - static_cast<unsigned>(low);
    const unsigned step = width / 32 + 1;
    const int key = low + static_cast<int>(min(lane * step, width));
    const bool is_within = __fmul_rn(row.value(key) - row.largest, factor) >= limit;
    const unsigned within = __ballot_sync(kAllLanes, is_within);
    const int first = within == 0 ? 32 : __ffs(static_cast<int>(within)) - 1;
    const int last_outside = __shfl_sync(kAllLanes, key, max(first - 1, 0));
    if (first < 32) high = __shfl_sync(kAllLanes, key, first);
    if (first > 0) low = last_outside + 1;
  }
  return high;
}

// The smallest key that all of the row's filters leave, and chunk_masses of what they leave.
// `total` is their sum, before and after.
template <class Row>
__device__ int filter_row(const Row& row, const RowOptions& options, Mass& total) {
  const int lowest = row.key(-INFINITY);
  int cut = lowest;
  if (options.min_p > 0.0) {
    const auto limit = static_cast<float>(log(options.min_p));
    cut = lowest_key_within(row, options.inverse_temperature, limit);
  }
  if (0 < options.top_k && options.top_k < row.logits.vocab_size) {
    cut = max(cut, kth_largest(row, options.top_k));
  }
  if (options.top_p < 1.0) {
    if (cut > lowest) total = row.keep(cut);
    // All weights below this one are together less than what top_p leaves out of a mass that is at
    // least the largest weight's, 1; halved, as sums are rounded.
    const double least = 0.5 * (1.0 - options.top_p) / row.logits.vocab_size;
    const int low = lowest_key_within(row, row.scale, log2f(static_cast<float>(least)));
    const CutRange range{
        .low = max(cut, low), .high = row.largest_key + 1, .mass_above = 0, .count_above = 0};
    // What top_k has left are few, but for equals of the last.
    const bool are_few = 0 < options.top_k && options.top_k <= kPickThreads;
    cut = nucleus_cut(row, range, total, options.top_p, are_few);
  }
  if (cut > lowest) total = row.keep(cut);
  return cut;
}

// The chunk where the running total of chunk_masses passes `target`, which is below `total`, and by
// how much less than its own mass it does. REQUIRES the block's threads together.
struct Place {
  int chunk;
  Mass rest;
};

template <class Row>
__device__ void find_chunk(const Row& row, Mass target, Place& found) {
  const int each = (row.num_chunks + kPickThreads - 1) / kPickThreads;
  const int first = static_cast<int>(threadIdx.x) * each;
  const int last = min(first + each, row.num_chunks);
  Mass own = 0;
  for (int chunk = first; chunk < last; ++chunk) own += row.chunk_masses[chunk];
  Mass end = warp_running_total(own);
  __syncthreads();
  if (threadIdx.x % 32 == 31) row.shared.warp_masses[threadIdx.x / 32][0] = end;
  __syncthreads();
  for (int warp = 0; warp < static_cast<int>(threadIdx.x) / 32; ++warp) {
    end += row.shared.warp_masses[warp][0];
  }
  Mass begin = end - own;
  if (begin <= target && target < end) {
    int chunk = first;
    while (begin + row.chunk_masses[chunk] <= target) begin += row.chunk_masses[chunk++];
    found = {.chunk = chunk, .rest = target - begin};
  }
  __syncthreads();
}

// The token of the row at `place`, by one warp: the same part of its chunk's mass, which is summed
// again relative to the chunk's largest.
template <class T>
__device__ void write_token(const PickRow<T>& row, int cut, const Place& place, int64_t* token_id) {
  constexpr int kVec = LogitRow<T>::kVec;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float x[kLaneLogits];
  row.logits.read(place.chunk, x);
  const float largest = row.value(row.chunk_keys[place.chunk]);
  Mass masses[kLaneLogits];
  Mass own = 0;
#pragma unroll
  for (int i = 0; i < kLaneLogits; ++i) {
    masses[i] = row.key(x[i]) >= cut ? mass_of(weight_of(x[i], largest, row.scale)) : 0;
    own += masses[i];
  }
  const Mass total = warp_total(own);
  const double part =
      static_cast<double>(place.rest) / static_cast<double>(row.chunk_masses[place.chunk]);
  const Mass target = min(static_cast<Mass>(part * static_cast<double>(total)), total - 1);
  Mass before = 0;
#pragma unroll
  for (int i = 0; i < kLaneLogits; i += kVec) {  // ids ascend by i / kVec, then by lane
    Mass some = 0;
#pragma unroll
    for (int j = 0; j < kVec; ++j) some += masses[i + j];
    const Mass end = before + warp_running_total(some);
    Mass begin = end - some;
    if (begin <= target && target < end) {
      int j = 0;
#pragma unroll
      for (int at = 0; at + 1 < kVec; ++at) {
        if (j == at && begin + masses[i + at] <= target) {
          begin += masses[i + at];
          j = at + 1;
        }
      }
      *token_id = static_cast<int64_t>(place.chunk) * kChunk + LogitRow<T>::place_of(lane, i) + j;
    }
    before = __shfl_sync(kAllLanes, end, 31);
  }
}

// The first token that has the row's largest logit.
template <class T>
__device__ void write_largest(const PickRow<T>& row, int64_t* token_id) {
  int first = INT_MIN;
  for (int chunk = static_cast<int>(threadIdx.x); chunk < row.num_chunks; chunk += kPickThreads) {
    if (row.chunk_keys[chunk] == row.largest_key) first = max(first, -chunk);
  }
  const int chunk = -block_max(first, row.shared);
  if (threadIdx.x >= 32) return;
  float x[kLaneLogits];
  row.logits.read(chunk, x);
  int place = kChunk;
#pragma unroll
  for (int i = kLaneLogits - 1; i >= 0; --i) {
    if (row.key(x[i]) == row.largest_key) {
      place = LogitRow<T>::place_of(static_cast<int>(threadIdx.x), i);
    }
  }
  place = __reduce_min_sync(kAllLanes, place);
  if (threadIdx.x == 0) *token_id = static_cast<int64_t>(chunk) * kChunk + place;
}

template <class T>
__global__ void __launch_bounds__(kPickThreads, 2)
    pick_tokens_kernel(const __grid_constant__ SampleTokensParams params) {
  begin_overlapped_kernel();
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ Place place;
  const int64_t row_index = blockIdx.x;
  const float2* stats = chunk_stats(params.rows, row_index);
  const LogitRow<T> logits(params.rows, row_index);
  const int spare = logits.is_edited() ? 0 : kSpareBits<T>;
  int64_t* token_id = params.token_ids + row_index;
  const PickMemory found(memory, params.rows);
  const int largest_key = found.load_keys(stats, spare);
  const float largest = value_of(largest_key);
  if (!isfinite(largest)) {
    if (threadIdx.x == 0) *token_id = -1;
    if (threadIdx.x == 0 && params.cuts != nullptr) params.cuts[row_index] = NAN;
    return;
  }
  const RowOptions options{.inverse_temperature = params.inverse_temperatures[row_index],
                           .top_k = params.top_k[row_index],
                           .top_p = params.top_p[row_index],
                           .min_p = params.min_p[row_index]};
  const PickRow<T> row{.logits = logits,
                       .num_chunks = found.num_chunks,
                       .spare = spare,
                       .scale = scale_of(options.inverse_temperature),
                       .largest = largest,
                       .largest_key = largest_key >> spare,
                       .chunk_keys = found.chunk_keys,
                       .chunk_masses = found.chunk_masses,
                       .active_chunks = found.active_chunks,
                       .shared = found.shared};
  if (row.scale == 0.0f) {
    if (threadIdx.x == 0 && params.cuts != nullptr) params.cuts[row_index] = largest;
    write_largest(row, token_id);
    return;
  }
  Mass total = row.load_masses(stats);
  const int cut = filter_row(row, options, total);
  const bool has_filter = cut > row.key(-INFINITY);
  if (threadIdx.x == 0 && params.cuts != nullptr) {
    params.cuts[row_index] = has_filter ? row.value(cut) : -INFINITY;
  }
  const double number = philox_uniform(static_cast<uint64_t>(params.seeds[row_index]),
                                       static_cast<uint64_t>(params.positions[row_index]),
                                       static_cast<uint64_t>(params.draws[row_index]));
  const Mass target = min(static_cast<Mass>(number * static_cast<double>(total)), total - 1);
  find_chunk(row, target, place);
  if (threadIdx.x < 32) write_token(row, cut, place, token_id);
}

}  // namespace

void launch_sample_tokens(const SampleTokensParams& params, StreamHandle stream) {
  if (params.rows.num_rows == 0) return;
  launch_scan_logits(params.rows, params.inverse_temperatures, stream);
  with_activation_type(params.rows.type, [&]<class T>(std::type_identity<T>) {
    launch_by_rows("sample_tokens", pick_tokens_kernel<T>, params.rows, stream, params);
  });
}

}  // namespace pagedkv::cuda
