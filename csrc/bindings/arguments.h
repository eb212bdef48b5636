// What Python hands over, checked and as C++ sees it: integers of any size, arrays of integers,
// writable buffers. Everything here raises ValueError or TypeError with the argument's name, what
// it may be and what it was.

#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace pagedkv::bindings {

namespace py = pybind11;

// An integer (int or anything with __index__, but not bool) between low and high.
std::int64_t to_integer(py::handle value, const char* name, std::int64_t low = INT64_MIN,
                        std::int64_t high = INT64_MAX);
std::optional<std::int64_t> to_optional_integer(py::handle value, const char* name,
                                                std::int64_t low, std::int64_t high);

// A one-dimensional array of integers, borrowed where its memory is as needed and converted
// otherwise.
template <class T>
class IntegerArray {
 public:
  IntegerArray(py::handle value, const char* name);
  std::span<const T> span() const { return span_; }

 private:
  py::array held_;  // keeps the memory that span_ shows
  std::span<const T> span_;
};

// Caller-owned memory to write into: a NumPy array, or a torch CPU tensor (seen through __array__,
// never copied).
template <class T>
py::array_t<T> to_buffer(py::handle value, const char* name, int num_dimensions);

// A NumPy array that owns a copy.
template <class T>
py::array_t<T> to_numpy(const std::vector<T>& values) {
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

}  // namespace pagedkv::bindings
