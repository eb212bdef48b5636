// Whether strided tensors share memory, from their addresses, sizes and strides alone. The checks
// that use it, and their messages, are in operand_checks.h. A dimension of one element has no
// stride that counts; a tensor without elements shares nothing.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace pagedkv::ops {

using torch::stable::Tensor;

// A multiple of `stride` bytes between lowest and highest times it, both included.
struct ByteSteps {
  int64_t stride;
  int64_t lowest;
  int64_t highest;
};

inline int64_t first_byte(const Tensor& tensor) {
  return reinterpret_cast<int64_t>(tensor.const_data_ptr());
}

// One past the last byte. REQUIRES elements.
inline int64_t end_byte(const Tensor& tensor) {
  const int64_t element = static_cast<int64_t>(tensor.element_size());
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return first_byte(tensor) + (last + 1) * element;
}

// No two indices of it have one address: every stride steps over all that the smaller ones reach.
// (Layouts that interleave more cleverly than that count as overlapping.)
inline bool has_distinct_elements(const Tensor& tensor) {
  std::vector<ByteSteps> dimensions;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) > 1) dimensions.push_back({tensor.stride(i), 0, tensor.size(i) - 1});
  }
  std::sort(dimensions.begin(), dimensions.end(),
            [](const ByteSteps& a, const ByteSteps& b) { return a.stride < b.stride; });
  int64_t reach = 1;
  for (const ByteSteps& dimension : dimensions) {
    if (dimension.stride < reach) return false;
    reach += dimension.highest * dimension.stride;
  }
  return true;
}

// Both are the same elements in the same order.
inline bool is_same_view(const Tensor& a, const Tensor& b) {
  if (first_byte(a) != first_byte(b) || a.dim() != b.dim()) return false;
  if (a.element_size() != b.element_size()) return false;
  for (int64_t i = 0; i < a.dim(); ++i) {
    if (a.size(i) != b.size(i)) return false;
    if (a.size(i) > 1 && a.stride(i) != b.stride(i)) return false;
  }
  return true;
}

// Whether steps [k, ...) can add up to exactly `distance`. num_trials bounds the work: when it is
// used up the answer is yes.
inline bool can_reach(const std::vector<ByteSteps>& steps, size_t k, int64_t distance,
                      int64_t& num_trials) {
  if (k == steps.size()) return distance == 0;
  int64_t rest_lowest = 0;
  int64_t rest_highest = 0;
  for (size_t i = k + 1; i < steps.size(); ++i) {
    rest_lowest += steps[i].lowest * steps[i].stride;
    rest_highest += steps[i].highest * steps[i].stride;
  }
  const ByteSteps& step = steps[k];
  // step.stride * n must end between distance - rest_highest and distance - rest_lowest. The
  // division rounds towards 0, so n starts and ends up to one too far out; the recursion sees that.
  const int64_t begin = std::max(step.lowest, (distance - rest_highest) / step.stride - 1);
  const int64_t end = std::min(step.highest, (distance - rest_lowest) / step.stride + 1);
  for (int64_t n = begin; n <= end; ++n) {
    const int64_t left = distance - n * step.stride;
    if (left < rest_lowest || rest_highest < left) continue;
    if (--num_trials < 0 || can_reach(steps, k + 1, left, num_trials)) return true;
  }
  return false;
}

// Whether a byte of `a` is a byte of `b`. Exact for views of one tensor that differ in where they
// begin, as the parts of a fused projection or the keys and values of one pool; for views whose
// different strides take longer to compare than a kernel may wait, yes.
inline bool may_share_memory(const Tensor& a, const Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  if (first_byte(a) >= end_byte(b) || first_byte(b) >= end_byte(a)) return false;
  // a + sum of i * stride_a = b + sum of j * stride_b, over the bytes of an element too. Equal
  // strides are one step, so that the search goes down once for each level of the layout.
  std::vector<ByteSteps> steps;
  const auto add = [&](int64_t stride, int64_t lowest, int64_t highest) {
    if (stride == 0 || lowest == highest) return;
    for (ByteSteps& step : steps) {
      if (step.stride != stride) continue;
      step.lowest += lowest;
      step.highest += highest;
      return;
    }
    steps.push_back({stride, lowest, highest});
  };
  const int64_t a_element = static_cast<int64_t>(a.element_size());
  const int64_t b_element = static_cast<int64_t>(b.element_size());
  for (int64_t i = 0; i < a.dim(); ++i) add(a.stride(i) * a_element, 0, a.size(i) - 1);
  for (int64_t i = 0; i < b.dim(); ++i) add(b.stride(i) * b_element, 1 - b.size(i), 0);
  add(1, 0, a_element - 1);
  add(1, 1 - b_element, 0);
  std::sort(steps.begin(), steps.end(),
            [](const ByteSteps& x, const ByteSteps& y) { return x.stride > y.stride; });
  int64_t num_trials = 4096;
  return can_reach(steps, 0, first_byte(b) - first_byte(a), num_trials);
}

}  // namespace pagedkv::ops
