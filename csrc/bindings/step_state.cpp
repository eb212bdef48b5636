// pagedkv._core.StepState: the C++ class; its arrays are views that keep it alive.

#include "pagedkv/core/step_state.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <string>

#include "arguments.h"
#include "module.h"

namespace pagedkv::bindings {
namespace {

StepState::Section section_of(const std::string& name) {
  for (std::size_t i = 0; i < StepState::kNumSections; ++i) {
    if (StepState::kNames[i] == name) return static_cast<StepState::Section>(i);
  }
  throw py::value_error("name must be a section of the state, got '" + name + "'");
}

template <class T>
py::array_t<T> view(py::handle owner, std::span<const T> words) {
  return py::array_t<T>(static_cast<py::ssize_t>(words.size()), words.data(), owner);
}

// Rows side by side, one for each slot.
py::array_t<std::int32_t> by_slot(py::handle value, const char* name, const StepState& state) {
  auto rows = to_buffer<std::int32_t>(value, name, 2);
  const bool is_dense = rows.strides(0) == rows.shape(1) * rows.itemsize() || rows.shape(0) <= 1;
  if (rows.shape(0) < state.max_num_slots() || !is_dense) {
    throw py::value_error(std::string(name) + " must have " +
                          std::to_string(state.max_num_slots()) +
                          " rows side by side, one for each slot, got " +
                          std::to_string(rows.shape(0)) + (is_dense ? "" : " apart"));
  }
  return rows;
}

void update(StepState& state, py::handle slots, py::handle query_lens, py::handle seq_lens,
            py::handle first_written, py::handle sample_rows, py::handle sample_draws,
            py::handle params, py::handle token_ids, py::handle padded) {
  const IntegerArray<std::int64_t> rows(slots, "slots");
  const IntegerArray<std::int64_t> counts(query_lens, "query_lens");
  const IntegerArray<std::int32_t> lens(seq_lens, "seq_lens");
  const IntegerArray<std::int32_t> firsts(first_written, "first_written");
  const IntegerArray<std::int64_t> samples(sample_rows, "sample_rows");
  const IntegerArray<std::int64_t> draws(sample_draws, "sample_draws");
  const auto drawn = by_slot(params, "params", state);
  if (drawn.shape(1) != StepState::kParamWords) {
    throw py::value_error("params must have " + std::to_string(StepState::kParamWords) +
                          " columns, got " + std::to_string(drawn.shape(1)));
  }
  const auto ids = by_slot(token_ids, "token_ids", state);
  auto num_padded = static_cast<std::int64_t>(rows.span().size());
  std::int64_t num_padded_tokens = 0;
  if (!padded.is_none()) {
    const auto size = py::cast<py::sequence>(padded);
    if (size.size() != 2) {
      throw py::value_error("padded must be (num_tokens, num_rows), got " +
                            std::to_string(size.size()) + " numbers");
    }
    num_padded_tokens = to_integer(size[0], "padded[0]", 0, kMaxSeqLen);
    num_padded = to_integer(size[1], "padded[1]", num_padded, state.max_num_slots());
  }
  state.update({.slots = rows.span(),
                .query_lens = counts.span(),
                .seq_lens = lens.span(),
                .first_written = firsts.span(),
                .sample_rows = samples.span(),
                .sample_draws = draws.span(),
                .params = drawn.data(),
                .token_ids = ids.data(),
                .max_model_len = ids.shape(1),
                .num_padded = num_padded,
                .num_padded_tokens = num_padded_tokens});
}

}  // namespace

void bind_step_state(py::module_& module) {
  py::class_<StepState>(module, "StepState")
      .def(py::init([](py::handle max_num_slots, py::handle max_num_blocks, py::handle block_size) {
             return std::make_unique<StepState>(to_integer(max_num_slots, "max_num_slots"),
                                                to_integer(max_num_blocks, "max_num_blocks"),
                                                to_integer(block_size, "block_size"));
           }),
           py::arg("max_num_slots"), py::arg("max_num_blocks"), py::arg("block_size"))
      .def_property_readonly("image",
                             [](py::object self) {
                               const auto image = self.cast<StepState&>().image();
                               return py::array_t<std::int32_t>(
                                   static_cast<py::ssize_t>(image.size()), image.data(), self);
                             })
      .def(
          "section",
          [](const StepState& state, const std::string& name) {
            const StepState::Section section = section_of(name);
            return py::make_tuple(state.begin_of(section), state.size_of(section));
          },
          py::arg("name"))
      .def("update", &update, py::arg("slots"), py::arg("query_lens"), py::arg("seq_lens"),
           py::arg("first_written"), py::arg("sample_rows"), py::arg("sample_draws"),
           py::arg("params"), py::arg("token_ids"), py::arg("padded") = py::none())
      .def(
          "tell",
          [](StepState& state, const std::string& name, py::handle values) {
            const IntegerArray<std::int32_t> words(values, "values");
            state.tell(section_of(name), words.span());
          },
          py::arg("name"), py::arg("values"))
      .def("take",
           [](py::object self) {
             auto& state = self.cast<StepState&>();
             const auto made =
                 py::make_tuple(view(self, state.token_ids()), view(self, state.indices()),
                                view(self, state.values()));
             state.take();  // the memory stays as it is until the next change
             return made;
           })
      .def("forget", &StepState::forget);
}

}  // namespace pagedkv::bindings
