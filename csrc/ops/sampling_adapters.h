// From tensors to params for sample_tokens, used by the CPU and the CUDA adapter alike; reads no
// tensor data.
#pragma once

#include "ops/operand_checks.h"
#include "pagedkv/kernels/sampling_params.h"

namespace pagedkv::ops {

// The op's operands, by their names in the schema.
struct SampleTokensOperands {
  const Tensor& token_ids;
  const std::optional<Tensor>& cuts;
  const Tensor& logits;
  const Tensor& inverse_temperatures;
  const Tensor& top_k;
  const Tensor& top_p;
  const Tensor& min_p;
  const Tensor& seeds;
  const Tensor& positions;
  const Tensor& draws;
  const std::optional<Tensor>& edit_start_loc;
  const std::optional<Tensor>& edit_ids;
  const std::optional<Tensor>& edit_values;
  const std::optional<Tensor>& is_limited;
};

// All four operands of the edits, or none.
inline LogitEdits logit_edits(const OperandChecks& check, const SampleTokensOperands& in) {
  const std::initializer_list<Operand> all = {{"edit_start_loc", in.edit_start_loc},
                                              {"edit_ids", in.edit_ids},
                                              {"edit_values", in.edit_values},
                                              {"is_limited", in.is_limited}};
  const Operand& first = *all.begin();
  for (const Operand& operand : all) {
    STD_TORCH_CHECK(operand.present() == first.present(), check.op(), ": ", operand.name(), " is ",
                    operand.present() ? "given" : "missing", ", expected ",
                    first.present() ? "it beside" : "none without", " edit_start_loc");
  }
  if (!first.present()) return {};
  const int64_t num_rows = in.logits.size(0);
  const int64_t num_edits = in.edit_ids->size(0);
  check.shape(*all.begin(), {num_rows + 1}, "[num_rows + 1]");
  check.shape({"edit_values", in.edit_values}, {num_edits, 3}, "[num_edits, 3]");
  check.shape({"is_limited", in.is_limited}, {num_rows}, "[num_rows]");
  return {.start_loc = in.edit_start_loc->const_data_ptr<int32_t>(),
          .ids = in.edit_ids->const_data_ptr<int32_t>(),
          .values = in.edit_values->const_data_ptr<float>(),
          .is_limited = in.is_limited->const_data_ptr<int32_t>()};
}

// Everything but the workspace.
inline SampleTokensParams sample_tokens_params(const SampleTokensOperands& in) {
  const OperandChecks check("pagedkv::sample_tokens");
  const Operand logits("logits", in.logits);
  const Operand token_ids("token_ids", in.token_ids);
  const Operand cuts("cuts", in.cuts);
  const std::initializer_list<Operand> rows = {
      {"inverse_temperatures", in.inverse_temperatures},
      {"top_k", in.top_k},
      {"top_p", in.top_p},
      {"min_p", in.min_p},
      {"seeds", in.seeds},
      {"positions", in.positions},
      {"draws", in.draws},
  };
  const std::initializer_list<Operand> edits = {{"edit_start_loc", in.edit_start_loc},
                                                {"edit_ids", in.edit_ids},
                                                {"edit_values", in.edit_values},
                                                {"is_limited", in.is_limited}};
  for (const auto& operands : {std::initializer_list<Operand>{token_ids, cuts}, rows, edits}) {
    for (const Operand& operand : operands) check.devices({logits, operand});
  }
  const ElementType type = check.activation_type(logits);
  check.dtypes(ScalarType::Long, {token_ids,
                                  {"top_k", in.top_k},
                                  {"seeds", in.seeds},
                                  {"positions", in.positions},
                                  {"draws", in.draws}});
  check.dtypes(ScalarType::Double, {{"top_p", in.top_p}, {"min_p", in.min_p}});
  check.dtypes(
      ScalarType::Float,
      {cuts, {"inverse_temperatures", in.inverse_temperatures}, {"edit_values", in.edit_values}});
  check.dtypes(ScalarType::Int, {{"edit_start_loc", in.edit_start_loc},
                                 {"edit_ids", in.edit_ids},
                                 {"is_limited", in.is_limited}});
  check.rows(logits, "[num_rows, vocab_size]");
  check.written_rows(token_ids, "[num_rows]");
  check.written_rows(cuts, "[num_rows]");
  for (const Operand& operand : rows) check.rows(operand, "[num_rows]");
  check.rows({"edit_start_loc", in.edit_start_loc}, "[num_rows + 1]");
  check.rows({"edit_ids", in.edit_ids}, "[num_edits]");
  check.contiguous({"edit_values", in.edit_values}, "[num_edits, 3]");
  check.rows({"is_limited", in.is_limited}, "[num_rows]");
  const int64_t num_rows = in.logits.size(0);
  const int64_t vocab_size = in.logits.size(1);
  check.in_range("vocab_size", vocab_size, 1, kMaxVocabSize);
  check.shape(token_ids, {num_rows}, "[num_rows]");
  check.shape(cuts, {num_rows}, "[num_rows]");
  for (const Operand& operand : rows) check.shape(operand, {num_rows}, "[num_rows]");
  const LogitEdits logit_edits_found = logit_edits(check, in);
  for (const Operand& written : {token_ids, cuts}) {
    check.apart(written, {logits});
    for (const Operand& operand : rows) check.apart(written, {operand});
    for (const Operand& operand : edits) check.apart(written, {operand});
  }
  check.apart(token_ids, {cuts});
  return {.token_ids = in.token_ids.mutable_data_ptr<int64_t>(),
          .cuts = in.cuts.has_value() ? in.cuts->mutable_data_ptr<float>() : nullptr,
          .logits = in.logits.const_data_ptr(),
          .type = type,
          .num_rows = num_rows,
          .vocab_size = vocab_size,
          .num_chunks = num_logit_chunks(vocab_size),
          .logits_stride_row = in.logits.stride(0),
          .inverse_temperatures = in.inverse_temperatures.const_data_ptr<float>(),
          .top_k = in.top_k.const_data_ptr<int64_t>(),
          .top_p = in.top_p.const_data_ptr<double>(),
          .min_p = in.min_p.const_data_ptr<double>(),
          .seeds = in.seeds.const_data_ptr<int64_t>(),
          .positions = in.positions.const_data_ptr<int64_t>(),
          .draws = in.draws.const_data_ptr<int64_t>(),
          .edits = logit_edits_found,
          .workspace = nullptr};
}

}  // namespace pagedkv::ops
