// pagedkv._core.PrefixGrouper: arrays in, arrays out.

#include "pagedkv/core/prefix_groups.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstring>
#include <optional>
#include <vector>

#include "arguments.h"
#include "module.h"

namespace pagedkv::bindings {
namespace {

// What the arguments show, and what keeps it alive.
class Batch {
 public:
  Batch(py::handle block_tables, py::handle seq_lens, py::handle query_lens, py::handle slots)
      : tables_(to_buffer<std::int32_t>(block_tables, "block_tables", 2)),
        lengths_(seq_lens, "seq_lens"),
        queries_(query_lens, "query_lens") {
    if (!slots.is_none()) slots_.emplace(slots, "slots");
    if (tables_.shape(0) > 1 && tables_.strides(0) % tables_.itemsize() != 0) {
      throw py::value_error("block_tables has rows that are not whole elements apart");
    }
    batch_.block_tables = tables_.data();
    batch_.num_block_table_rows = tables_.shape(0);
    batch_.max_num_blocks = tables_.shape(1);
    batch_.block_table_stride =
        tables_.shape(0) > 1 ? tables_.strides(0) / tables_.itemsize() : tables_.shape(1);
    batch_.seq_lens = lengths_.span();
    batch_.query_lens = queries_.span();
    if (slots_.has_value()) batch_.slots = slots_->span();
  }
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  const PrefixBatch& batch() const { return batch_; }

 private:
  py::array_t<std::int32_t> tables_;
  IntegerArray<std::int32_t> lengths_;
  IntegerArray<std::int64_t> queries_;
  std::optional<IntegerArray<std::int64_t>> slots_;
  PrefixBatch batch_;
};

py::array_t<std::int32_t> rows_of(const std::vector<PrefixGroup>& groups) {
  static_assert(sizeof(PrefixGroup) == 3 * sizeof(std::int32_t));
  py::array_t<std::int32_t> rows({static_cast<py::ssize_t>(groups.size()), py::ssize_t{3}});
  if (!groups.empty()) {
    std::memcpy(rows.mutable_data(), groups.data(), groups.size() * sizeof(PrefixGroup));
  }
  return rows;
}

PrefixGrouper make(py::handle block_size, py::handle max_query_len, py::handle window,
                   double per_step, double per_row, double per_row_key, py::handle seqs_per_tile) {
  return PrefixGrouper(to_integer(block_size, "block_size"),
                       to_integer(max_query_len, "max_query_len"), to_integer(window, "window"),
                       {.per_step = per_step,
                        .per_row = per_row,
                        .per_row_key = per_row_key,
                        .seqs_per_tile = to_integer(seqs_per_tile, "seqs_per_tile")});
}

}  // namespace

void bind_prefix_groups(py::module_& module) {
  py::class_<PrefixGrouper>(module, "PrefixGrouper")
      .def(py::init(&make), py::arg("block_size"), py::kw_only(), py::arg("max_query_len") = 1,
           py::arg("window") = 0, py::arg("per_step") = 0.0, py::arg("per_row") = 0.0,
           py::arg("per_row_key") = 0.0, py::arg("seqs_per_tile") = 1)
      .def(
          "find",
          [](PrefixGrouper& grouper, py::handle block_tables, py::handle seq_lens,
             py::handle query_lens, py::handle slots) {
            const Batch batch(block_tables, seq_lens, query_lens, slots);
            return rows_of(grouper.find(batch.batch()));
          },
          py::arg("block_tables"), py::arg("seq_lens"), py::arg("query_lens"),
          py::arg("slots") = py::none())
      .def(
          "arrange",
          [](PrefixGrouper& grouper, py::handle block_tables, py::handle seq_lens,
             py::handle query_lens, py::handle slots) {
            const Batch batch(block_tables, seq_lens, query_lens, slots);
            std::vector<std::int64_t> order;
            const std::vector<PrefixGroup> groups = grouper.arrange(batch.batch(), order);
            return py::make_tuple(to_numpy(order), rows_of(groups));
          },
          py::arg("block_tables"), py::arg("seq_lens"), py::arg("query_lens"),
          py::arg("slots") = py::none());
}

}  // namespace pagedkv::bindings
