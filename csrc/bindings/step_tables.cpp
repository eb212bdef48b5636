// pagedkv._core.StepTables: the C++ class, plus the Python objects that keep its manager and its
// buffers' memory alive, so that no other buffer can appear at an address whose content is
// remembered.

#include "pagedkv/core/step_tables.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <vector>

#include "arguments.h"
#include "module.h"

namespace pagedkv::bindings {
namespace {

class PyStepTables {
 public:
  PyStepTables(const BlockManager& manager, py::handle max_num_slots, py::handle max_num_blocks)
      : tables_(manager, to_integer(max_num_slots, "max_num_slots"),
                to_integer(max_num_blocks, "max_num_blocks")) {}

  std::int64_t write(py::handle seq_ids, py::handle query_lens, py::handle slots,
                     py::handle block_tables, py::handle slot_mapping, py::handle positions,
                     py::handle seq_lens, py::handle query_start_loc, bool only_changed,
                     py::handle first_written) {
    const IntegerArray<SeqId> ids(seq_ids, "seq_ids");
    const IntegerArray<std::int64_t> lens(query_lens, "query_lens");
    const IntegerArray<std::int64_t> rows(slots, "slots");
    auto tables = to_buffer<std::int32_t>(block_tables, "block_tables", 2);
    auto mapping = to_buffer<std::int64_t>(slot_mapping, "slot_mapping", 1);
    auto at = to_buffer<std::int64_t>(positions, "positions", 1);
    auto lengths = to_buffer<std::int32_t>(seq_lens, "seq_lens", 1);
    auto starts = to_buffer<std::int32_t>(query_start_loc, "query_start_loc", 1);
    if (tables.shape(1) < tables_.max_num_blocks()) {
      throw py::value_error("block_tables has rows of " + std::to_string(tables.shape(1)) +
                            " entries, max_num_blocks is " +
                            std::to_string(tables_.max_num_blocks()));
    }
    const py::ssize_t stride =
        tables.shape(0) > 1 ? tables.strides(0) / tables.itemsize() : tables.shape(1);
    if (tables.shape(0) > 1 && tables.strides(0) % tables.itemsize() != 0) {
      throw py::value_error("block_tables has rows that are not whole elements apart");
    }
    StepBuffers buffers{
        .block_tables = tables.mutable_data(),
        .num_block_table_rows = tables.shape(0),
        .block_table_stride = stride,
        .slot_mapping = {mapping.mutable_data(), static_cast<std::size_t>(mapping.size())},
        .positions = {at.mutable_data(), static_cast<std::size_t>(at.size())},
        .seq_lens = {lengths.mutable_data(), static_cast<std::size_t>(lengths.size())},
        .query_start_loc = {starts.mutable_data(), static_cast<std::size_t>(starts.size())},
    };
    py::array_t<std::int32_t> firsts;
    if (!first_written.is_none()) {
      firsts = to_buffer<std::int32_t>(first_written, "first_written", 1);
      if (firsts.size() < static_cast<py::ssize_t>(ids.span().size())) {
        throw py::value_error("first_written has " + std::to_string(firsts.size()) +
                              " entries, the step needs " + std::to_string(ids.span().size()));
      }
      buffers.first_written = {firsts.mutable_data(), static_cast<std::size_t>(firsts.size())};
    }
    const std::int64_t num_tokens =
        tables_.write(ids.span(), lens.span(), rows.span(), buffers, only_changed);
    hold(tables);
    return num_tokens;
  }

  void forget(py::handle block_tables) {
    const auto tables = to_buffer<std::int32_t>(block_tables, "block_tables", 2);
    tables_.forget(tables.data());
    std::erase_if(held_, [&](const py::array& array) { return array.data() == tables.data(); });
  }

  std::int64_t num_entries_written() const { return tables_.num_entries_written(); }

 private:
  // Keeps the buffers used last alive, most recent last; one let go is forgotten.
  void hold(const py::array& tables) {
    const auto found = std::find_if(held_.begin(), held_.end(), [&](const py::array& array) {
      return array.data() == tables.data();
    });
    if (found != held_.end()) {
      std::rotate(found, found + 1, held_.end());
      return;
    }
    if (held_.size() == StepTables::kMaxBuffers) {
      tables_.forget(static_cast<const BlockId*>(held_.front().data()));
      held_.erase(held_.begin());
    }
    held_.push_back(tables);
  }

  StepTables tables_;
  std::vector<py::array> held_;
};

}  // namespace

void bind_step_tables(py::module_& module) {
  py::class_<PyStepTables>(module, "StepTables")
      .def(py::init<const BlockManager&, py::handle, py::handle>(), py::keep_alive<1, 2>(),
           py::arg("manager"), py::arg("max_num_slots"), py::arg("max_num_blocks"))
      .def("write", &PyStepTables::write, py::arg("seq_ids"), py::arg("query_lens"),
           py::arg("slots"), py::kw_only(), py::arg("block_tables"), py::arg("slot_mapping"),
           py::arg("positions"), py::arg("seq_lens"), py::arg("query_start_loc"),
           py::arg("only_changed") = false, py::arg("first_written") = py::none())
      .def("forget", &PyStepTables::forget, py::arg("block_tables"))
      .def_property_readonly("num_entries_written", &PyStepTables::num_entries_written);
}

}  // namespace pagedkv::bindings
