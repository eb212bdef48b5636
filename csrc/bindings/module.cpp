// Entry point of pagedkv._core. It needs NumPy and nothing else of Python's world, above all no
// torch.

#include "module.h"

PYBIND11_MODULE(_core, module) {
  module.doc() = "The compiled core: block manager and step tables.";
  pagedkv::bindings::bind_values(module);
  pagedkv::bindings::bind_block_manager(module);
  pagedkv::bindings::bind_step_tables(module);
  pagedkv::bindings::bind_step_state(module);
  pagedkv::bindings::bind_prefix_groups(module);
  pagedkv::bindings::bind_token_ids(module);
}
