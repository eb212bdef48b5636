// The pieces of pagedkv._core; module.cpp calls each once. The Python side's contract is
// python/pagedkv/_core.pyi.

#pragma once

#include <pybind11/pybind11.h>

namespace pagedkv::bindings {

void bind_values(pybind11::module_& module);         // errors, enums, Statistics, Snapshot
void bind_block_manager(pybind11::module_& module);  // BlockManager
void bind_step_tables(pybind11::module_& module);    // StepTables
void bind_step_state(pybind11::module_& module);     // StepState
void bind_prefix_groups(pybind11::module_& module);  // PrefixGrouper
void bind_token_ids(pybind11::module_& module);      // token_ids

}  // namespace pagedkv::bindings
