// pagedkv._core.token_ids: a list of Python integers as an array. NumPy looks at each element
// twice and takes several times as long, and all prompts of a list are read before its first step
// (benchmarks/results/2026-11-30-prefix2048-attempts.md).

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>

#include "arguments.h"
#include "module.h"

namespace pagedkv::bindings {
namespace {

py::object token_ids(const py::list& values, std::int64_t vocab_size) {
  const Py_ssize_t count = PyList_GET_SIZE(values.ptr());
  py::array_t<std::int32_t> ids(count);
  std::int32_t* to = ids.mutable_data();
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* value = PyList_GET_ITEM(values.ptr(), i);
    if (!PyLong_CheckExact(value)) return py::none();
    int overflow = 0;
    const long long id = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow != 0 || id < 0 || id >= vocab_size) return py::none();
    to[i] = static_cast<std::int32_t>(id);
  }
  return ids;
}

}  // namespace

void bind_token_ids(py::module_& module) {
  module.def(
      "token_ids",
      [](const py::list& values, py::handle vocab_size) {
        return token_ids(values, to_integer(vocab_size, "vocab_size", 0, std::int64_t{1} << 31));
      },
      py::arg("values"), py::arg("vocab_size"));
}

}  // namespace pagedkv::bindings
