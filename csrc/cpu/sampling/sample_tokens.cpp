// sample_tokens on the CPU, row by row. Filters look at few logits where few can pass; sums of
// weights are fp64, the cumulative distribution goes by ascending ids.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/kernel_table.h"
#include "pagedkv/kernels/cpu_launchers.h"
#include "pagedkv/kernels/edit_params.h"
#include "pagedkv/kernels/philox.h"

namespace pagedkv::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kGroupSize = 64;

// Memory that the rows of one thread use one after the other.
struct Scratch {
  std::vector<float> logits;   // [vocab_size]
  std::vector<float> weights;  // [vocab_size]
  std::vector<float> some;
};

void edit_row(const LogitEdits& edits, int64_t row, std::vector<float>& logits,
              std::vector<float>& listed) {
  const int32_t begin = edits.start_loc[row];
  int32_t end = edits.start_loc[row + 1];
  while (end > begin && edits.ids[end - 1] == kNoEditId) --end;
  listed.clear();
  for (int32_t at = begin; at < end; ++at) {
    const float bias = edits.values[3 * at];
    const float factor = edits.values[3 * at + 1];
    const float biased = logits[static_cast<size_t>(edits.ids[at])] + bias;
    listed.push_back((biased > 0.0f ? biased / factor : biased * factor) -
                     edits.values[3 * at + 2]);
  }
  if (edits.is_limited[row] != 0) {
    // Not NaN, nor infinity: they stay to be seen.
    for (float& x : logits) x = x < kInfinity ? -kInfinity : x;
  }
  for (int32_t at = begin; at < end; ++at) {
    logits[static_cast<size_t>(edits.ids[at])] = listed[static_cast<size_t>(at - begin)];
  }
}

// The k-th largest, counted from 1 and with repeats. The k-th largest of the maxima of groups is a
// lower bound, and few logits reach it.
float kth_largest(const std::vector<float>& logits, int64_t k, std::vector<float>& some) {
  const auto size = static_cast<int64_t>(logits.size());
  float bound = -kInfinity;
  some.clear();
  if (k <= size / kGroupSize) {
    for (int64_t i = 0; i + kGroupSize <= size; i += kGroupSize) {
      some.push_back(*std::max_element(logits.begin() + i, logits.begin() + i + kGroupSize));
    }
    std::nth_element(some.begin(), some.begin() + (k - 1), some.end(), std::greater<>());
    bound = some[static_cast<size_t>(k - 1)];
    some.clear();
  }
  for (const float x : logits) {
    if (x >= bound) some.push_back(x);
  }
  std::nth_element(some.begin(), some.begin() + (k - 1), some.end(), std::greater<>());
  return some[static_cast<size_t>(k - 1)];
}

struct Candidate {
  float logit;
  float weight;
};

// The logit of the candidate where their weights, from the largest logit down, add up to `wanted`;
// of the last if they do not. Halves instead of a sort: sums of what is left decide which goes on.
float reaching_logit(std::vector<Candidate>& candidates, double wanted) {
  auto begin = candidates.begin();
  auto end = candidates.end();
  while (end - begin > 1) {
    const auto middle = begin + (end - begin) / 2;
    std::nth_element(begin, middle, end,
                     [](const Candidate& a, const Candidate& b) { return a.logit > b.logit; });
    double sum = 0.0;
    for (auto it = begin; it != middle; ++it) sum += it->weight;
    if (sum >= wanted) {
      end = middle;
    } else {
      wanted -= sum;
      begin = middle;
    }
  }
  return begin->logit;
}

// The smallest logit of those not below `cut` that top_p leaves. Candidates have weights above a
// floor, which sinks until they reach top_p.
float nucleus_cut(const Scratch& row, float cut, double top_p) {
  double total = 0.0;
  for (size_t i = 0; i < row.logits.size(); ++i) {
    if (row.logits[i] >= cut) total += row.weights[i];
  }
  std::vector<Candidate> above;
  for (float floor = 0x1p-4f;; floor = floor > 0x1p-60f ? floor / 16 : 0.0f) {
    above.clear();
    double sum = 0.0;
    for (size_t i = 0; i < row.logits.size(); ++i) {
      if (row.logits[i] < cut || row.weights[i] <= floor) continue;
      above.push_back({row.logits[i], row.weights[i]});
      sum += row.weights[i];
    }
    if (sum >= top_p * total || floor == 0.0f) break;
  }
  return reaching_logit(above, top_p * total);
}

// The first id whose cumulative weight exceeds number * total; one without a weight is never it.
int64_t inverse(const std::vector<float>& weights, double number) {
  double total = 0.0;
  for (const float weight : weights) total += weight;
  const double target = std::min(number * total, std::nextafter(total, 0.0));
  double reached = 0.0;
  size_t id = 0;
  while ((reached += weights[id]) <= target) ++id;
  return static_cast<int64_t>(id);
}

void sample_row(const SampleTokensParams& p, int64_t row, const KernelTable& passes,
                Scratch& scratch) {
  std::vector<float>& logits = scratch.logits;
  const char* from = static_cast<const char*>(p.rows.logits) +
                     row * p.rows.stride_row * element_bytes(p.rows.type);
  passes.widen_logits(logits.data(), from, p.rows.type, p.rows.vocab_size);
  if (p.rows.edits.start_loc != nullptr) edit_row(p.rows.edits, row, logits, scratch.some);
  const float largest = passes.largest_logit(logits.data(), p.rows.vocab_size);
  if (!std::isfinite(largest)) {
    p.token_ids[row] = -1;
    if (p.cuts != nullptr) p.cuts[row] = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  const float inverse_temperature = p.inverse_temperatures[row];
  float cut = -kInfinity;
  if (inverse_temperature == 0.0f) {
    cut = largest;
    p.token_ids[row] = std::find(logits.begin(), logits.end(), largest) - logits.begin();
  } else {
    std::vector<float>& weights = scratch.weights;
    weights = logits;
    passes.logit_weights(weights.data(), p.rows.vocab_size, largest, inverse_temperature);
    if (p.min_p[row] > 0.0) {
      const auto limit = static_cast<float>(std::log(p.min_p[row]));
      cut = largest;
      for (const float x : logits) {
        if (x < cut && (x - largest) * inverse_temperature >= limit) cut = x;
      }
    }
    if (0 < p.top_k[row] && p.top_k[row] < p.rows.vocab_size) {
      cut = std::max(cut, kth_largest(logits, p.top_k[row], scratch.some));
    }
    if (p.top_p[row] < 1.0) cut = nucleus_cut(scratch, cut, p.top_p[row]);
    if (cut > -kInfinity) {
      for (size_t i = 0; i < weights.size(); ++i) weights[i] = logits[i] >= cut ? weights[i] : 0.0f;
    }
    const double number =
        philox_uniform(static_cast<uint64_t>(p.seeds[row]), static_cast<uint64_t>(p.positions[row]),
                       static_cast<uint64_t>(p.draws[row]));
    p.token_ids[row] = inverse(weights, number);
  }
  if (p.cuts != nullptr) p.cuts[row] = cut;
}

}  // namespace

void sample_rows(const SampleTokensParams& params, const KernelTable& passes,
                 const ThreadPool& pool) {
  parallel_for(pool, 0, params.rows.num_rows, 1, [&](int64_t begin, int64_t end) {
    Scratch scratch;
    scratch.logits.resize(static_cast<size_t>(params.rows.vocab_size));
    for (int64_t row = begin; row < end; ++row) sample_row(params, row, passes, scratch);
  });
}

}  // namespace pagedkv::cpu
