// Checks and conversions of what Python hands over. The contract is in the header.

#include "arguments.h"

#include <algorithm>
#include <limits>
#include <string>

namespace pagedkv::bindings {
namespace {

std::string type_name(py::handle value) { return Py_TYPE(value.ptr())->tp_name; }

// As numpy.asarray: an array as it is, a list or a tensor converted.
py::array as_array(py::handle value, const char* name) {
  if (py::isinstance<py::array>(value)) return py::reinterpret_borrow<py::array>(value);
  py::array converted = py::array::ensure(value);
  if (!converted)
    throw py::type_error(std::string(name) + " must be an array of integers, got " +
                         type_name(value));
  return converted;
}

// Whether the elements are native T; as array_t's check, without asking NumPy's registry for T.
template <class T>
bool holds(const py::array& array) {
  const py::dtype dtype = array.dtype();
  return dtype.kind() == 'i' && dtype.itemsize() == sizeof(T) && dtype.byteorder() == '=';
}

[[noreturn]] void refuse_value(const char* name, py::ssize_t index, const std::string& value,
                               std::int64_t low, std::int64_t high) {
  throw py::value_error(std::string(name) + "[" + std::to_string(index) + "] must be between " +
                        std::to_string(low) + " and " + std::to_string(high) + ", got " + value);
}

}  // namespace

std::int64_t to_integer(py::handle value, const char* name, std::int64_t low, std::int64_t high) {
  if (PyBool_Check(value.ptr()) || !PyIndex_Check(value.ptr())) {
    throw py::type_error(std::string(name) + " must be an integer, got " + type_name(value));
  }
  const auto number = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
  if (!number) throw py::error_already_set();
  int overflow = 0;
  const long long result = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  if (overflow != 0 || result < low || result > high) {
    throw py::value_error(std::string(name) + " must be between " + std::to_string(low) + " and " +
                          std::to_string(high) + ", got " + std::string(py::str(number)));
  }
  return result;
}

std::optional<std::int64_t> to_optional_integer(py::handle value, const char* name,
                                                std::int64_t low, std::int64_t high) {
  if (value.is_none()) return std::nullopt;
  return to_integer(value, name, low, high);
}

template <class T>
IntegerArray<T>::IntegerArray(py::handle value, const char* name) {
  py::array array = as_array(value, name);
  if (array.ndim() != 1) {
    throw py::value_error(std::string(name) + " must have one dimension, got " +
                          std::to_string(array.ndim()));
  }
  const char kind = array.dtype().kind();
  if (array.size() == 0) return;
  if (kind != 'i' && kind != 'u') {
    throw py::type_error(std::string(name) + " must be an array of integers, got dtype " +
                         std::string(py::str(array.dtype())));
  }
  if (!holds<T>(array) || (array.flags() & py::array::c_style) == 0) {
    if (kind == 'u' && array.itemsize() == 8) {
      const auto wide = py::array_t<std::uint64_t, py::array::c_style>::ensure(array);
      const auto high = static_cast<std::uint64_t>(std::numeric_limits<T>::max());
      for (py::ssize_t i = 0; i < wide.size(); ++i) {
        if (wide.data()[i] > high) {
          refuse_value(name, i, std::to_string(wide.data()[i]), std::numeric_limits<T>::min(),
                       std::numeric_limits<T>::max());
        }
      }
    }
    const auto wide =
        py::array_t<std::int64_t, py::array::c_style | py::array::forcecast>::ensure(array);
    if (!wide) throw py::error_already_set();
    if constexpr (sizeof(T) < sizeof(std::int64_t)) {
      constexpr std::int64_t kLow = std::numeric_limits<T>::min();
      constexpr std::int64_t kHigh = std::numeric_limits<T>::max();
      py::array_t<T> narrow(wide.size());
      bool fits = true;
      for (py::ssize_t i = 0; i < wide.size(); ++i) {
        fits &= wide.data()[i] >= kLow && wide.data()[i] <= kHigh;
        narrow.mutable_data()[i] = static_cast<T>(wide.data()[i]);
      }
      for (py::ssize_t i = 0; !fits; ++i) {
        if (wide.data()[i] < kLow || wide.data()[i] > kHigh) {
          refuse_value(name, i, std::to_string(wide.data()[i]), kLow, kHigh);
        }
      }
      array = std::move(narrow);
    } else {
      array = wide;
    }
  }
  held_ = std::move(array);
  span_ = {static_cast<const T*>(held_.data()), static_cast<std::size_t>(held_.size())};
}

template class IntegerArray<std::int32_t>;
template class IntegerArray<std::int64_t>;

template <class T>
py::array_t<T> to_buffer(py::handle value, const char* name, int num_dimensions) {
  const auto wanted = [&] {
    return std::string(name) + " must be a writable NumPy array or torch CPU tensor of " +
           std::string(py::str(py::dtype::of<T>())) + " with " + std::to_string(num_dimensions) +
           (num_dimensions == 1 ? " dimension" : " dimensions") + " and a contiguous last one";
  };
  py::array array;
  if (py::isinstance<py::array>(value)) {
    array = py::reinterpret_borrow<py::array>(value);
  } else if (py::hasattr(value, "data_ptr") && py::hasattr(value, "__array__")) {
    array = py::array::ensure(value);
    // A conversion that copied would take the writes and lose them.
    if (!array || reinterpret_cast<std::uintptr_t>(array.data()) !=
                      py::cast<std::uintptr_t>(value.attr("data_ptr")())) {
      PyErr_Clear();
      throw py::value_error(wanted() + ", got a " + type_name(value) +
                            " whose memory cannot be shared");
    }
  } else {
    throw py::type_error(wanted() + ", got " + type_name(value));
  }
  const bool is_contiguous =
      array.ndim() > 0 &&
      (array.shape(array.ndim() - 1) <= 1 || array.strides(array.ndim() - 1) == array.itemsize());
  if (!holds<T>(array) || array.ndim() != num_dimensions || !array.writeable() || !is_contiguous) {
    throw py::value_error(wanted() + ", got " + std::string(py::str(array.dtype())) + " with " +
                          std::to_string(array.ndim()) + " dimensions" +
                          (array.writeable() ? "" : ", read-only") +
                          (is_contiguous ? "" : ", with strides"));
  }
  return py::reinterpret_borrow<py::array_t<T>>(array);
}

template py::array_t<std::int32_t> to_buffer<std::int32_t>(py::handle, const char*, int);
template py::array_t<std::int64_t> to_buffer<std::int64_t>(py::handle, const char*, int);

}  // namespace pagedkv::bindings
