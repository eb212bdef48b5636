// pagedkv._core.BlockManager: arguments in, arrays and lists out; all policy is the C++ class's.
// The GIL is kept, so that two Python threads cannot meet inside one manager.

#include "pagedkv/core/block_manager.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "module.h"

namespace pagedkv::bindings {
namespace {

using Ids = IntegerArray<SeqId>;
using Counts = IntegerArray<std::int64_t>;
using Tokens = IntegerArray<TokenId>;

std::unique_ptr<BlockManager> make_manager(py::handle num_blocks, py::handle block_size,
                                           py::handle num_cpu_blocks, double watermark,
                                           bool enable_prefix_caching,
                                           const std::optional<py::bytes>& hash_secret,
                                           py::handle hash_bits, py::handle shuffle_seed,
                                           bool enable_kv_offloading) {
  BlockManagerConfig config{
      .num_blocks = to_integer(num_blocks, "num_blocks"),
      .block_size = to_integer(block_size, "block_size"),
      .num_cpu_blocks = to_integer(num_cpu_blocks, "num_cpu_blocks"),
      .watermark = watermark,
      .enable_prefix_caching = enable_prefix_caching,
      .hash_secret = std::nullopt,
      .hash_bits = to_integer(hash_bits, "hash_bits"),
      .shuffle_seed = std::nullopt,
      .enable_kv_offloading = enable_kv_offloading,
  };
  if (hash_secret) config.hash_secret = std::string(*hash_secret);
  if (const auto seed = to_optional_integer(shuffle_seed, "shuffle_seed", 0, INT64_MAX)) {
    config.shuffle_seed = static_cast<std::uint64_t>(*seed);
  }
  return std::make_unique<BlockManager>(config);
}

std::vector<std::pair<BlockId, BlockId>> to_pairs(const std::vector<BlockCopy>& copies) {
  std::vector<std::pair<BlockId, BlockId>> pairs;
  pairs.reserve(copies.size());
  for (const BlockCopy& copy : copies) pairs.emplace_back(copy.source, copy.destination);
  return pairs;
}

py::array_t<std::int64_t> to_pair_array(const std::vector<BlockCopy>& copies) {
  py::array_t<std::int64_t> pairs({static_cast<py::ssize_t>(copies.size()), py::ssize_t{2}});
  std::int64_t* at = pairs.mutable_data();
  for (const BlockCopy& copy : copies) {
    *at++ = copy.source;
    *at++ = copy.destination;
  }
  return pairs;
}

template <class T, class Get>
py::array_t<T> per_block(std::int64_t num_blocks, Get get) {
  py::array_t<T> values(static_cast<py::ssize_t>(num_blocks));
  T* at = values.mutable_data();
  for (BlockId block = 0; block < num_blocks; ++block) at[block] = get(block);
  return values;
}

SeqId to_seq_id(py::handle value) { return to_integer(value, "seq_id"); }

std::optional<std::int64_t> to_max_new_tokens(py::handle value) {
  return to_optional_integer(value, "max_new_tokens", 0, kMaxSeqLen);
}

std::int64_t to_window(py::handle value) { return to_integer(value, "window", 0, kMaxSeqLen); }

void bind_single_calls(py::class_<BlockManager>& manager) {
  manager
      .def(
          "match",
          [](const BlockManager& self, py::handle token_ids, std::string_view extra_key) {
            return self.match(Tokens(token_ids, "token_ids").span(), extra_key);
          },
          py::arg("token_ids"), py::kw_only(), py::arg("extra_key") = py::bytes())
      .def(
          "can_allocate",
          [](const BlockManager& self, py::handle token_ids, py::handle max_new_tokens,
             py::handle reserve_tokens, std::string_view extra_key, py::handle window) {
            return self.can_allocate(Tokens(token_ids, "token_ids").span(),
                                     to_max_new_tokens(max_new_tokens),
                                     to_integer(reserve_tokens, "reserve_tokens", 0, kMaxSeqLen),
                                     extra_key, to_window(window));
          },
          py::arg("token_ids"), py::kw_only(), py::arg("max_new_tokens") = py::none(),
          py::arg("reserve_tokens") = 0, py::arg("extra_key") = py::bytes(), py::arg("window") = 0)
      .def(
          "allocate",
          [](BlockManager& self, py::handle seq_id, py::handle token_ids, py::handle max_new_tokens,
             std::string_view extra_key, py::handle window) {
            return self.allocate(to_seq_id(seq_id), Tokens(token_ids, "token_ids").span(),
                                 to_max_new_tokens(max_new_tokens), extra_key, to_window(window));
          },
          py::arg("seq_id"), py::arg("token_ids"), py::kw_only(),
          py::arg("max_new_tokens") = py::none(), py::arg("extra_key") = py::bytes(),
          py::arg("window") = 0)
      .def(
          "max_window_blocks",
          [](const BlockManager& self, py::handle window, py::handle num_tokens) {
            return self.max_window_blocks(to_integer(window, "window", 1, kMaxSeqLen),
                                          to_integer(num_tokens, "num_tokens", 0, kMaxSeqLen));
          },
          py::arg("window"), py::arg("num_tokens") = 1)
      .def(
          "append",
          [](BlockManager& self, py::handle seq_id, py::handle num_tokens) {
            return to_pairs(self.append(to_seq_id(seq_id),
                                        to_integer(num_tokens, "num_tokens", 0, kMaxSeqLen)));
          },
          py::arg("seq_id"), py::arg("num_tokens") = 1)
      .def(
          "fork",
          [](BlockManager& self, py::handle parent_id, py::handle child_id) {
            self.fork(to_integer(parent_id, "parent_id"), to_integer(child_id, "child_id"));
          },
          py::arg("parent_id"), py::arg("child_id"))
      .def(
          "free", [](BlockManager& self, py::handle seq_id) { self.free(to_seq_id(seq_id)); },
          py::arg("seq_id"))
      .def(
          "free_behind",
          [](BlockManager& self, py::handle seq_id, py::handle first_needed_token) {
            return self.free_behind(to_seq_id(seq_id),
                                    to_integer(first_needed_token, "first_needed_token"));
          },
          py::arg("seq_id"), py::arg("first_needed_token"))
      .def(
          "publish",
          [](BlockManager& self, py::handle seq_id, py::handle token_ids,
             py::handle num_computed_tokens) {
            self.publish(to_seq_id(seq_id), Tokens(token_ids, "token_ids").span(),
                         to_integer(num_computed_tokens, "num_computed_tokens"));
          },
          py::arg("seq_id"), py::arg("token_ids"), py::arg("num_computed_tokens"))
      .def(
          "num_tokens",
          [](const BlockManager& self, py::handle seq_id) {
            return self.sequence(to_seq_id(seq_id)).num_tokens;
          },
          py::arg("seq_id"))
      .def(
          "block_table",
          [](const BlockManager& self, py::handle seq_id) {
            return to_numpy(self.sequence(to_seq_id(seq_id)).table);
          },
          py::arg("seq_id"))
      .def(
          "num_freed_blocks",
          [](const BlockManager& self, py::handle seq_id) {
            return self.sequence(to_seq_id(seq_id)).num_freed;
          },
          py::arg("seq_id"))
      .def(
          "is_swapped",
          [](const BlockManager& self, py::handle seq_id) {
            return self.sequence(to_seq_id(seq_id)).is_swapped;
          },
          py::arg("seq_id"))
      .def(
          "__contains__",
          [](const BlockManager& self, py::handle seq_id) {
            return self.contains(to_seq_id(seq_id));
          },
          py::arg("seq_id"));
}

void bind_batch_calls(py::class_<BlockManager>& manager) {
  manager
      .def(
          "num_blocks_needed",
          [](const BlockManager& self, py::handle seq_ids, py::handle counts) {
            return self.num_blocks_needed(Ids(seq_ids, "seq_ids").span(),
                                          Counts(counts, "counts").span());
          },
          py::arg("seq_ids"), py::arg("counts"))
      .def(
          "append_batch",
          [](BlockManager& self, py::handle seq_ids, py::handle counts) {
            return to_pair_array(
                self.append_batch(Ids(seq_ids, "seq_ids").span(), Counts(counts, "counts").span()));
          },
          py::arg("seq_ids"), py::arg("counts"))
      .def(
          "fork_batch",
          [](BlockManager& self, py::handle parent_ids, py::handle child_ids) {
            self.fork_batch(Ids(parent_ids, "parent_ids").span(),
                            Ids(child_ids, "child_ids").span());
          },
          py::arg("parent_ids"), py::arg("child_ids"))
      .def(
          "free_batch",
          [](BlockManager& self, py::handle seq_ids) {
            self.free_batch(Ids(seq_ids, "seq_ids").span());
          },
          py::arg("seq_ids"))
      .def(
          "free_behind_batch",
          [](BlockManager& self, py::handle seq_ids, py::handle first_needed_tokens) {
            return self.free_behind_batch(
                Ids(seq_ids, "seq_ids").span(),
                Counts(first_needed_tokens, "first_needed_tokens").span());
          },
          py::arg("seq_ids"), py::arg("first_needed_tokens"))
      .def(
          "publish_batch",
          [](BlockManager& self, py::handle seq_ids, py::handle token_ids, py::handle counts,
             py::handle num_computed_tokens) {
            self.publish_batch(Ids(seq_ids, "seq_ids").span(),
                               Tokens(token_ids, "token_ids").span(),
                               Counts(counts, "counts").span(),
                               Counts(num_computed_tokens, "num_computed_tokens").span());
          },
          py::arg("seq_ids"), py::arg("token_ids"), py::arg("counts"),
          py::arg("num_computed_tokens"))
      .def(
          "swap_out",
          [](BlockManager& self, py::handle seq_ids) {
            return to_pairs(self.swap_out(Ids(seq_ids, "seq_ids").span()));
          },
          py::arg("seq_ids"))
      .def(
          "swap_in",
          [](BlockManager& self, py::handle seq_ids) {
            return to_pairs(self.swap_in(Ids(seq_ids, "seq_ids").span()));
          },
          py::arg("seq_ids"))
      .def(
          "num_swap_out_blocks",
          [](const BlockManager& self, py::handle seq_ids) {
            return self.num_swap_out_blocks(Ids(seq_ids, "seq_ids").span());
          },
          py::arg("seq_ids"))
      .def(
          "num_swap_in_blocks",
          [](const BlockManager& self, py::handle seq_ids) {
            return self.num_swap_in_blocks(Ids(seq_ids, "seq_ids").span());
          },
          py::arg("seq_ids"));
}

}  // namespace

void bind_block_manager(py::module_& module) {
  py::class_<BlockManager> manager(module, "BlockManager");
  manager
      .def(py::init(&make_manager), py::arg("num_blocks"), py::arg("block_size") = 16,
           py::kw_only(), py::arg("num_cpu_blocks") = 0, py::arg("watermark") = 0.01,
           py::arg("enable_prefix_caching") = true, py::arg("hash_secret") = py::none(),
           py::arg("hash_bits") = 128, py::arg("shuffle_seed") = py::none(),
           py::arg("enable_kv_offloading") = false)
      .def_property_readonly("num_blocks", &BlockManager::num_blocks)
      .def_property_readonly("block_size", &BlockManager::block_size)
      .def_property_readonly("has_offloading", &BlockManager::has_offloading)
      .def_property_readonly("num_allocatable_blocks", &BlockManager::num_allocatable_blocks)
      .def_property_readonly("num_returning_blocks", &BlockManager::num_returning_blocks);
  bind_single_calls(manager);
  bind_batch_calls(manager);
  manager.def("begin_step", &BlockManager::begin_step)
      .def(
          "end_step",
          [](BlockManager& self, py::handle step_id, bool has_failed) {
            self.end_step(to_integer(step_id, "step_id"), has_failed);
          },
          py::arg("step_id"), py::kw_only(), py::arg("has_failed") = false)
      .def("take_moves",
           [](BlockManager& self) {
             const Moves moves = self.take_moves();
             return std::make_pair(to_pair_array(moves.out), to_pair_array(moves.in));
           })
      .def_property("swap_in_cost", &BlockManager::swap_in_cost, &BlockManager::set_swap_in_cost)
      .def("reset_prefix_cache", &BlockManager::reset_prefix_cache)
      .def("statistics", &BlockManager::statistics)
      .def("snapshot",
           [](const BlockManager& self) {
             return std::const_pointer_cast<Snapshot>(self.snapshot());
           })
      .def("ref_counts",
           [](const BlockManager& self) {
             return per_block<std::int32_t>(self.num_blocks(),
                                            [&](BlockId block) { return self.ref_count(block); });
           })
      .def("states",
           [](const BlockManager& self) {
             return per_block<std::uint8_t>(self.num_blocks(), [&](BlockId block) {
               return static_cast<std::uint8_t>(self.state(block));
             });
           })
      .def("cpu_states",
           [](const BlockManager& self) {
             return per_block<std::uint8_t>(self.num_cpu_blocks(), [&](BlockId block) {
               return static_cast<std::uint8_t>(self.cpu_state(block));
             });
           })
      .def("take_evicted",
           [](BlockManager& self) {
             const std::vector<Eviction> evicted = self.take_evicted();
             py::array_t<std::int64_t> rows(
                 {static_cast<py::ssize_t>(evicted.size()), py::ssize_t{4}});
             std::int64_t* at = rows.mutable_data();
             for (const Eviction& one : evicted) {
               *at++ = one.block;
               *at++ = one.seq_id;
               *at++ = one.idle_steps;
               *at++ = one.cpu_block;
             }
             return rows;
           })
      .def_property_readonly("last_miss",
                             [](const BlockManager& self) { return PrefixMiss(self.last_miss()); })
      .def("check_invariants", &BlockManager::check_invariants);
}

}  // namespace pagedkv::bindings
