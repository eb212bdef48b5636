// From tensors to params for advance_step and advance_edits, used by the CPU and the CUDA adapters
// alike; reads no tensor data.
#pragma once

#include "ops/operand_checks.h"
#include "pagedkv/kernels/attention_params.h"
#include "pagedkv/kernels/edit_params.h"
#include "pagedkv/kernels/step_params.h"

namespace pagedkv::ops {

// The operands of advance_step, by their names in the schema.
struct AdvanceStepOperands {
  const Tensor& lens;
  const Tensor& tokens;
  const Tensor& block_tables;
  const Tensor& seq_lens;
  const Tensor& samples;
  const Tensor& filters;
  const Tensor& inverse_temperatures;
  const Tensor& counts;
  const Tensor& slots;
  const Tensor& query_start_loc;
  const Tensor& sample_start_loc;
  const Tensor& tables;
  const Tensor& draws;
  const Tensor& params;
  const Tensor& latest;
  const Tensor& token_ids;
};

// Rows that are read as a struct.
inline void check_aligned(const OperandChecks& check, const Operand& operand, size_t alignment) {
  const auto address = reinterpret_cast<uintptr_t>(operand.tensor().const_data_ptr());
  STD_TORCH_CHECK(operand.tensor().size(0) == 0 || address % alignment == 0, check.op(), ": ",
                  operand.name(), " starts ", address % alignment, " bytes after a multiple of ",
                  alignment, ", expected an aligned tensor");
}

inline void check_advance_step(const OperandChecks& check, const AdvanceStepOperands& in,
                               int64_t block_size) {
  const std::initializer_list<Operand> written = {
      {"lens", in.lens},
      {"tokens", in.tokens},
      {"block_tables", in.block_tables},
      {"seq_lens", in.seq_lens},
      {"samples", in.samples},
      {"filters", in.filters},
      {"inverse_temperatures", in.inverse_temperatures}};
  const std::initializer_list<Operand> read = {{"counts", in.counts},
                                               {"slots", in.slots},
                                               {"query_start_loc", in.query_start_loc},
                                               {"sample_start_loc", in.sample_start_loc},
                                               {"tables", in.tables},
                                               {"draws", in.draws},
                                               {"params", in.params},
                                               {"latest", in.latest},
                                               {"token_ids", in.token_ids}};
  for (const auto& operands : {written, read}) {
    for (const Operand& operand : operands) check.devices({*written.begin(), operand});
  }
  check.dtypes(ScalarType::Int, {{"lens", in.lens},
                                 {"block_tables", in.block_tables},
                                 {"seq_lens", in.seq_lens},
                                 {"counts", in.counts},
                                 {"slots", in.slots},
                                 {"query_start_loc", in.query_start_loc},
                                 {"sample_start_loc", in.sample_start_loc},
                                 {"tables", in.tables},
                                 {"draws", in.draws},
                                 {"params", in.params},
                                 {"token_ids", in.token_ids}});
  check.dtypes(ScalarType::Long,
               {{"tokens", in.tokens}, {"samples", in.samples}, {"latest", in.latest}});
  check.dtypes(ScalarType::Double, {{"filters", in.filters}});
  check.dtypes(ScalarType::Float, {{"inverse_temperatures", in.inverse_temperatures}});

  check.written_rows({"lens", in.lens}, "[num_slots]");
  check.written_rows({"tokens", in.tokens}, "[3, num_tokens]");
  check.written_rows({"block_tables", in.block_tables}, "[num_rows, max_num_blocks]");
  check.written_rows({"seq_lens", in.seq_lens}, "[num_rows]");
  check.written_rows({"samples", in.samples}, "[6, num_samples]");
  check.written_rows({"filters", in.filters}, "[2, num_samples]");
  check.written_rows({"inverse_temperatures", in.inverse_temperatures}, "[num_samples]");
  check.rows({"counts", in.counts}, "[2]");
  check.rows({"slots", in.slots}, "[num_rows]");
  check.rows({"query_start_loc", in.query_start_loc}, "[num_rows + 1]");
  check.rows({"sample_start_loc", in.sample_start_loc}, "[num_rows + 1]");
  check.contiguous({"tables", in.tables}, "[num_slots, max_num_blocks]");
  check.rows({"draws", in.draws}, "[num_slots]");
  check.contiguous({"params", in.params}, "[num_slots, 8]");
  check.rows({"latest", in.latest}, "[num_slots + 1]");
  check.rows({"token_ids", in.token_ids}, "[num_token_ids]");

  const int64_t num_slots = in.lens.size(0);
  const int64_t num_rows = in.seq_lens.size(0);
  const int64_t num_samples = in.inverse_temperatures.size(0);
  check.shape({"tokens", in.tokens}, {3, kAnySize}, "[3, num_tokens]");
  check.shape({"block_tables", in.block_tables}, {num_rows, kAnySize},
              "[num_rows, max_num_blocks]");
  check.shape({"samples", in.samples}, {6, num_samples}, "[6, num_samples]");
  check.shape({"filters", in.filters}, {2, num_samples}, "[2, num_samples]");
  check.shape({"counts", in.counts}, {2}, "[2]");
  check.shape({"slots", in.slots}, {num_rows}, "[num_rows]");
  check.shape({"query_start_loc", in.query_start_loc}, {num_rows + 1}, "[num_rows + 1]");
  check.shape({"sample_start_loc", in.sample_start_loc}, {num_rows + 1}, "[num_rows + 1]");
  check.shape({"tables", in.tables}, {num_slots, kAnySize}, "[num_slots, max_num_blocks]");
  check.shape({"draws", in.draws}, {num_slots}, "[num_slots]");
  check.shape({"params", in.params}, {num_slots, 8}, "[num_slots, 8]");
  check.shape({"latest", in.latest}, {num_slots + 1}, "[num_slots + 1]");
  check_aligned(check, {"params", in.params}, alignof(DrawParams));
  for (const Operand& one : written) {
    for (const Operand& operand : read) check.apart(one, {operand});
    for (const Operand& other : written) {
      if (&other > &one) check.apart(one, {other});
    }
  }
  check.in_range("block_size", block_size, 1, kMaxBlockSize);
}

inline AdvanceStepParams advance_step_params(const AdvanceStepOperands& in, int64_t block_size) {
  const OperandChecks check("pagedkv::advance_step");
  check_advance_step(check, in, block_size);
  auto* tokens = in.tokens.mutable_data_ptr<int64_t>();
  auto* samples = in.samples.mutable_data_ptr<int64_t>();
  auto* filters = in.filters.mutable_data_ptr<double>();
  const int64_t sample_stride = in.samples.stride(0);
  return {.lens = in.lens.mutable_data_ptr<int32_t>(),
          .input_ids = tokens,
          .positions = tokens + in.tokens.stride(0),
          .slot_mapping = tokens + 2 * in.tokens.stride(0),
          .block_tables = in.block_tables.mutable_data_ptr<int32_t>(),
          .seq_lens = in.seq_lens.mutable_data_ptr<int32_t>(),
          .logit_rows = samples,
          .sample_slots = samples + sample_stride,
          .top_k = samples + 2 * sample_stride,
          .seeds = samples + 3 * sample_stride,
          .sample_positions = samples + 4 * sample_stride,
          .sample_draws = samples + 5 * sample_stride,
          .top_p = filters,
          .min_p = filters + in.filters.stride(0),
          .inverse_temperatures = in.inverse_temperatures.mutable_data_ptr<float>(),
          .counts = in.counts.const_data_ptr<int32_t>(),
          .slots = in.slots.const_data_ptr<int32_t>(),
          .query_start_loc = in.query_start_loc.const_data_ptr<int32_t>(),
          .sample_start_loc = in.sample_start_loc.const_data_ptr<int32_t>(),
          .tables = in.tables.const_data_ptr<int32_t>(),
          .draws = in.draws.const_data_ptr<int32_t>(),
          .params = static_cast<const DrawParams*>(in.params.const_data_ptr()),
          .latest = in.latest.const_data_ptr<int64_t>(),
          .token_ids = in.token_ids.const_data_ptr<int32_t>(),
          .num_rows = in.seq_lens.size(0),
          .num_tokens = in.tokens.size(1),
          .num_samples = in.inverse_temperatures.size(0),
          .num_slots = in.lens.size(0),
          .max_num_blocks = in.tables.size(1),
          .num_token_ids = in.token_ids.size(0),
          .block_size = block_size,
          .block_tables_width = in.block_tables.size(1),
          .block_tables_stride = in.block_tables.stride(0)};
}

// The operands of advance_edits, by their names in the schema.
struct AdvanceEditsOperands {
  const Tensor& ids;
  const Tensor& counts;
  const Tensor& values;
  const Tensor& start_loc;
  const Tensor& is_limited;
  const Tensor& rows;
  const Tensor& latest;
  const Tensor& last_ids;
  const Tensor& last_counts;
  const Tensor& last_values;
  const Tensor& sent;
};

inline AdvanceEditsParams advance_edits_params(const AdvanceEditsOperands& in) {
  const OperandChecks check("pagedkv::advance_edits");
  const std::initializer_list<Operand> written = {
      {"ids", in.ids}, {"counts", in.counts}, {"values", in.values}};
  const std::initializer_list<Operand> read = {
      {"start_loc", in.start_loc}, {"is_limited", in.is_limited},  {"rows", in.rows},
      {"latest", in.latest},       {"last_ids", in.last_ids},      {"last_counts", in.last_counts},
      {"sent", in.sent},           {"last_values", in.last_values}};
  for (const auto& operands : {written, read}) {
    for (const Operand& operand : operands) check.devices({*written.begin(), operand});
  }
  check.dtypes(ScalarType::Int, {{"ids", in.ids},
                                 {"counts", in.counts},
                                 {"start_loc", in.start_loc},
                                 {"is_limited", in.is_limited},
                                 {"rows", in.rows},
                                 {"last_ids", in.last_ids},
                                 {"last_counts", in.last_counts},
                                 {"sent", in.sent}});
  check.dtypes(ScalarType::Long, {{"latest", in.latest}});
  check.dtypes(ScalarType::Float, {{"values", in.values}, {"last_values", in.last_values}});

  check.written_rows({"ids", in.ids}, "[num_edits]");
  check.written_rows({"counts", in.counts}, "[num_edits]");
  check.contiguous({"values", in.values}, "[num_edits, 3]");
  check.rows({"start_loc", in.start_loc}, "[num_rows + 1]");
  check.rows({"is_limited", in.is_limited}, "[num_rows]");
  check.contiguous({"rows", in.rows}, "[num_rows, 8]");
  check.rows({"latest", in.latest}, "[num_slots]");
  check.rows({"last_ids", in.last_ids}, "[num_last]");
  check.rows({"last_counts", in.last_counts}, "[num_last]");
  check.contiguous({"last_values", in.last_values}, "[num_last, 3]");
  check.contiguous({"sent", in.sent}, "[num_sent, 3]");

  const int64_t num_rows = in.rows.size(0);
  const int64_t num_edits = in.ids.size(0);
  const int64_t num_last = in.last_ids.size(0);
  check.shape({"counts", in.counts}, {num_edits}, "[num_edits]");
  check.shape({"values", in.values}, {num_edits, 3}, "[num_edits, 3]");
  check.shape({"start_loc", in.start_loc}, {num_rows + 1}, "[num_rows + 1]");
  check.shape({"is_limited", in.is_limited}, {num_rows}, "[num_rows]");
  check.shape({"rows", in.rows}, {num_rows, 8}, "[num_rows, 8]");
  check.shape({"last_counts", in.last_counts}, {num_last}, "[num_last]");
  check.shape({"last_values", in.last_values}, {num_last, 3}, "[num_last, 3]");
  check.shape({"sent", in.sent}, {kAnySize, 3}, "[num_sent, 3]");
  check_aligned(check, {"rows", in.rows}, alignof(EditRow));
  for (const Operand& one : written) {
    for (const Operand& operand : read) check.apart(one, {operand});
    for (const Operand& other : written) {
      if (&other > &one) check.apart(one, {other});
    }
  }
  return {.ids = in.ids.mutable_data_ptr<int32_t>(),
          .counts = in.counts.mutable_data_ptr<int32_t>(),
          .values = in.values.mutable_data_ptr<float>(),
          .start_loc = in.start_loc.const_data_ptr<int32_t>(),
          .is_limited = in.is_limited.const_data_ptr<int32_t>(),
          .rows = static_cast<const EditRow*>(in.rows.const_data_ptr()),
          .latest = in.latest.const_data_ptr<int64_t>(),
          .last_ids = in.last_ids.const_data_ptr<int32_t>(),
          .last_counts = in.last_counts.const_data_ptr<int32_t>(),
          .last_values = in.last_values.const_data_ptr<float>(),
          .sent = static_cast<const SentEdit*>(in.sent.const_data_ptr()),
          .num_rows = num_rows,
          .num_edits = num_edits,
          .num_slots = in.latest.size(0),
          .num_last = num_last,
          .num_sent = in.sent.size(0)};
}

}  // namespace pagedkv::ops
