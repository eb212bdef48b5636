// Bytes: a fuzzer's input, drawn from in small numbers.

#pragma once

#include <cstddef>
#include <cstdint>

namespace pagedkv::testing {

class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}
  bool is_empty() const { return at_ >= size_; }
  // 0 .. bound - 1; zeros once the input has ended.
  std::int64_t below(std::int64_t bound) { return is_empty() ? 0 : data_[at_++] % bound; }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
  std::size_t at_ = 0;
};

}  // namespace pagedkv::testing
