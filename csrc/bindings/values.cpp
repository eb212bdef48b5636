// Errors, enums and the two records that leave the manager: Statistics and Snapshot.

#include <pybind11/native_enum.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <string>

#include "module.h"
#include "pagedkv/core/snapshot.h"
#include "pagedkv/core/types.h"

namespace pagedkv::bindings {
namespace py = pybind11;
namespace {

// Shows a vector of an immutable snapshot, which it keeps alive, as a read-only array.
template <class T, class Shown = T>
auto column(std::vector<T> Snapshot::* field) {
  static_assert(sizeof(T) == sizeof(Shown));
  return [field](const std::shared_ptr<Snapshot>& snapshot) {
    const std::vector<T>& values = (*snapshot).*field;
    py::array_t<Shown> array(static_cast<py::ssize_t>(values.size()),
                             reinterpret_cast<const Shown*>(values.data()), py::cast(snapshot));
    array.attr("flags").attr("writeable") = false;
    return array;
  };
}

std::string describe(const Statistics& s) {
  return "Statistics(num_blocks=" + std::to_string(s.num_blocks) +
         ", num_free=" + std::to_string(s.num_free) +
         ", num_cached_idle=" + std::to_string(s.num_cached_idle) +
         ", num_referenced=" + std::to_string(s.num_referenced) +
         ", num_shared=" + std::to_string(s.num_shared) +
         ", num_in_transit=" + std::to_string(s.num_in_transit) +
         ", num_draining=" + std::to_string(s.num_draining) +
         ", num_cpu_blocks=" + std::to_string(s.num_cpu_blocks) +
         ", num_cpu_free=" + std::to_string(s.num_cpu_free) +
         ", num_sequences=" + std::to_string(s.num_sequences) +
         ", num_tokens=" + std::to_string(s.num_tokens) + ")";
}

}  // namespace

void bind_values(py::module_& module) {
  py::register_exception<OutOfBlocks>(module, "OutOfBlocks", PyExc_RuntimeError);
  py::register_exception<UnknownSequence>(module, "UnknownSequence", PyExc_KeyError);
  py::register_exception<DoubleFree>(module, "DoubleFree", PyExc_RuntimeError);
  py::register_exception<InvariantViolation>(module, "InvariantViolation", PyExc_RuntimeError);

  module.attr("FREED_BLOCK") = kFreedBlock;

  py::native_enum<CanAllocate>(module, "CanAllocate", "enum.Enum")
      .value("OK", CanAllocate::kOk)
      .value("LATER", CanAllocate::kLater)
      .value("NEVER", CanAllocate::kNever)
      .finalize();
  py::native_enum<BlockState>(module, "BlockState", "enum.Enum")
      .value("FREE", BlockState::kFree)
      .value("CACHED_IDLE", BlockState::kCachedIdle)
      .value("REFERENCED", BlockState::kReferenced)
      .value("IN_TRANSIT", BlockState::kInTransit)
      .value("DRAINING", BlockState::kDraining)
      .finalize();
  py::native_enum<MissReason>(module, "MissReason", "enum.Enum")
      .value("NONE", MissReason::kNone)
      .value("NEVER_CACHED", MissReason::kNeverCached)
      .value("EVICTED", MissReason::kEvicted)
      .value("CACHING_OFF", MissReason::kCachingOff)
      .value("ON_CPU", MissReason::kOnCpu)
      .finalize();
  py::class_<PrefixMiss>(module, "PrefixMiss")
      .def_readonly("reason", &PrefixMiss::reason)
      .def_readonly("evicted_in", &PrefixMiss::evicted_in)
      .def_readonly("evicted_for", &PrefixMiss::evicted_for);

  py::class_<Statistics>(module, "Statistics")
      .def_readonly("num_blocks", &Statistics::num_blocks)
      .def_readonly("num_free", &Statistics::num_free)
      .def_readonly("num_cached_idle", &Statistics::num_cached_idle)
      .def_readonly("num_referenced", &Statistics::num_referenced)
      .def_readonly("num_shared", &Statistics::num_shared)
      .def_readonly("num_in_transit", &Statistics::num_in_transit)
      .def_readonly("num_draining", &Statistics::num_draining)
      .def_readonly("num_cpu_blocks", &Statistics::num_cpu_blocks)
      .def_readonly("num_cpu_free", &Statistics::num_cpu_free)
      .def_readonly("num_cpu_cached_idle", &Statistics::num_cpu_cached_idle)
      .def_readonly("num_sequences", &Statistics::num_sequences)
      .def_readonly("num_tokens", &Statistics::num_tokens)
      .def_readonly("token_occupancy", &Statistics::token_occupancy)
      .def_readonly("block_occupancy", &Statistics::block_occupancy)
      .def_readonly("prefix_cache_queries", &Statistics::prefix_cache_queries)
      .def_readonly("prefix_cache_hits", &Statistics::prefix_cache_hits)
      .def_readonly("prefix_cache_cpu_hits", &Statistics::prefix_cache_cpu_hits)
      .def_readonly("prefix_cache_misses", &Statistics::prefix_cache_misses)
      .def_readonly("prefix_cache_evictions", &Statistics::prefix_cache_evictions)
      .def_readonly("num_evictions", &Statistics::num_evictions)
      .def_readonly("num_offloaded", &Statistics::num_offloaded)
      .def_readonly("num_onloaded", &Statistics::num_onloaded)
      .def_readonly("num_offload_drops", &Statistics::num_offload_drops)
      .def_readonly("num_copies", &Statistics::num_copies)
      .def_readonly("num_swapped_out", &Statistics::num_swapped_out)
      .def_readonly("num_swapped_in", &Statistics::num_swapped_in)
      .def("__repr__", &describe);

  py::class_<Snapshot, std::shared_ptr<Snapshot>>(module, "Snapshot")
      .def_readonly("version", &Snapshot::version)
      .def_readonly("block_size", &Snapshot::block_size)
      .def_readonly("statistics", &Snapshot::statistics)
      .def_property_readonly("ref_counts", column(&Snapshot::ref_counts))
      .def_property_readonly("states", column<BlockState, std::uint8_t>(&Snapshot::states))
      .def_property_readonly("cpu_states", column<BlockState, std::uint8_t>(&Snapshot::cpu_states))
      .def_property_readonly("seq_ids", column(&Snapshot::seq_ids))
      .def_property_readonly("seq_num_tokens", column(&Snapshot::seq_num_tokens))
      .def_property_readonly("seq_start_loc", column(&Snapshot::seq_start_loc))
      .def_property_readonly("block_ids", column(&Snapshot::block_ids));
}

}  // namespace pagedkv::bindings
