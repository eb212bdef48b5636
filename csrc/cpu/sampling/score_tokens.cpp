// score_tokens on the CPU, row by row; sums are fp64.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "cpu/kernel_table.h"
#include "pagedkv/kernels/cpu_launchers.h"

namespace pagedkv::cpu {
namespace {

// A logit so far below the largest adds nothing to an fp64 sum of as many as there can be.
constexpr float kNothing = -64.0f;

void score_row(const ScoreTokensParams& p, int64_t row, const KernelTable& passes,
               std::vector<float>& logits, std::vector<int64_t>& ids) {
  const LogitRows& rows = p.rows;
  const char* from =
      static_cast<const char*>(rows.logits) + row * rows.stride_row * element_bytes(rows.type);
  passes.widen_logits(logits.data(), from, rows.type, rows.vocab_size);
  const float largest = passes.largest_logit(logits.data(), rows.vocab_size);
  int64_t* top_ids = p.top_ids + row * p.top_ids_stride_row;
  double* top_logprobs = p.top_logprobs + row * p.top_logprobs_stride_row;
  if (!std::isfinite(largest)) {
    constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
    p.logprobs[row] = kNone;
    p.ranks[row] = 0;
    std::fill_n(top_ids, p.num_top, -1);
    std::fill_n(top_logprobs, p.num_top, kNone);
    return;
  }
  double total = 0.0;
  for (const float x : logits) {
    if (x - largest > kNothing) total += std::exp(static_cast<double>(x) - largest);
  }
  const double log_sum = largest + std::log(total);
  const int64_t id = p.token_ids[row];
  const bool has_logit = 0 <= id && id < rows.vocab_size;
  const float own =
      has_logit ? logits[static_cast<size_t>(id)] : -std::numeric_limits<float>::infinity();
  p.logprobs[row] = own - log_sum;
  p.ranks[row] = 1 + std::count_if(logits.begin(), logits.end(), [&](float x) { return x > own; });
  ids.resize(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  const auto at = [&](int64_t i) { return logits[static_cast<size_t>(i)]; };
  std::partial_sort(ids.begin(), ids.begin() + p.num_top, ids.end(), [&](int64_t a, int64_t b) {
    return at(a) > at(b) || (at(a) == at(b) && a < b);
  });
  for (int64_t i = 0; i < p.num_top; ++i) {
    top_ids[i] = ids[static_cast<size_t>(i)];
    top_logprobs[i] = at(top_ids[i]) - log_sum;
  }
}

}  // namespace

void score_rows(const ScoreTokensParams& params, const KernelTable& passes,
                const ThreadPool& pool) {
  parallel_for(pool, 0, params.rows.num_rows, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> logits(static_cast<size_t>(params.rows.vocab_size));
    std::vector<int64_t> ids;
    for (int64_t row = begin; row < end; ++row) score_row(params, row, passes, logits, ids);
  });
}

}  // namespace pagedkv::cpu
