// From tensors to params for sample_tokens and score_tokens, used by the CPU and the CUDA adapter
// alike; reads no tensor data.
#pragma once

#include <algorithm>

#include "ops/operand_checks.h"
#include "pagedkv/kernels/sampling_params.h"

namespace pagedkv::ops {

// [num_rows, vocab_size]. Everything but edits and workspace; dtype and layout are checked already.
inline LogitRows logit_rows(const OperandChecks& check, const Tensor& logits, ElementType type) {
  check.in_range("vocab_size", logits.size(1), 1, kMaxVocabSize);
  return {.logits = logits.const_data_ptr(),
          .type = type,
          .num_rows = logits.size(0),
          .vocab_size = logits.size(1),
          .num_chunks = num_logit_chunks(logits.size(1)),
          .stride_row = logits.stride(0),
          .edits = {},
          .workspace = nullptr};
}

// The operands of sample_tokens, by their names in the schema.
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
  LogitRows logit_rows_found = logit_rows(check, in.logits, type);
  const int64_t num_rows = in.logits.size(0);
  check.shape(token_ids, {num_rows}, "[num_rows]");
  check.shape(cuts, {num_rows}, "[num_rows]");
  for (const Operand& operand : rows) check.shape(operand, {num_rows}, "[num_rows]");
  logit_rows_found.edits = logit_edits(check, in);
  for (const Operand& written : {token_ids, cuts}) {
    check.apart(written, {logits});
    for (const Operand& operand : rows) check.apart(written, {operand});
    for (const Operand& operand : edits) check.apart(written, {operand});
  }
  check.apart(token_ids, {cuts});
  return {.token_ids = in.token_ids.mutable_data_ptr<int64_t>(),
          .cuts = in.cuts.has_value() ? in.cuts->mutable_data_ptr<float>() : nullptr,
          .rows = logit_rows_found,
          .inverse_temperatures = in.inverse_temperatures.const_data_ptr<float>(),
          .top_k = in.top_k.const_data_ptr<int64_t>(),
          .top_p = in.top_p.const_data_ptr<double>(),
          .min_p = in.min_p.const_data_ptr<double>(),
          .seeds = in.seeds.const_data_ptr<int64_t>(),
          .positions = in.positions.const_data_ptr<int64_t>(),
          .draws = in.draws.const_data_ptr<int64_t>()};
}

// Everything but the workspace.
inline ScoreTokensParams score_tokens_params(const Tensor& logprobs, const Tensor& ranks,
                                             const Tensor& top_ids, const Tensor& top_logprobs,
                                             const Tensor& logits, const Tensor& token_ids) {
  const OperandChecks check("pagedkv::score_tokens");
  const std::initializer_list<Operand> written = {{"logprobs", logprobs},
                                                  {"ranks", ranks},
                                                  {"top_ids", top_ids},
                                                  {"top_logprobs", top_logprobs}};
  check.devices({{"logits", logits},
                 {"token_ids", token_ids},
                 {"logprobs", logprobs},
                 {"ranks", ranks},
                 {"top_ids", top_ids},
                 {"top_logprobs", top_logprobs}});
  const ElementType type = check.activation_type({"logits", logits});
  check.dtypes(ScalarType::Long,
               {{"token_ids", token_ids}, {"ranks", ranks}, {"top_ids", top_ids}});
  check.dtypes(ScalarType::Double, {{"logprobs", logprobs}, {"top_logprobs", top_logprobs}});
  check.rows({"logits", logits}, "[num_rows, vocab_size]");
  check.rows({"token_ids", token_ids}, "[num_rows]");
  check.written_rows({"logprobs", logprobs}, "[num_rows]");
  check.written_rows({"ranks", ranks}, "[num_rows]");
  check.written_rows({"top_ids", top_ids}, "[num_rows, num_top]");
  check.written_rows({"top_logprobs", top_logprobs}, "[num_rows, num_top]");
  const LogitRows rows = logit_rows(check, logits, type);
  const int64_t num_top = top_ids.size(1);
  check.shape({"token_ids", token_ids}, {rows.num_rows}, "[num_rows]");
  check.shape({"logprobs", logprobs}, {rows.num_rows}, "[num_rows]");
  check.shape({"ranks", ranks}, {rows.num_rows}, "[num_rows]");
  check.shape({"top_ids", top_ids}, {rows.num_rows, kAnySize}, "[num_rows, num_top]");
  check.shape({"top_logprobs", top_logprobs}, {rows.num_rows, num_top}, "[num_rows, num_top]");
  check.in_range("num_top", num_top, 0, std::min(kMaxTopTokens, rows.vocab_size));
  for (const Operand& one : written) {
    check.apart(one, {{"logits", logits}, {"token_ids", token_ids}});
    for (const Operand& other : written) {
      if (&other > &one) check.apart(one, {other});
    }
  }
  return {.logprobs = logprobs.mutable_data_ptr<double>(),
          .ranks = ranks.mutable_data_ptr<int64_t>(),
          .top_ids = top_ids.mutable_data_ptr<int64_t>(),
          .top_logprobs = top_logprobs.mutable_data_ptr<double>(),
          .rows = rows,
          .token_ids = token_ids.const_data_ptr<int64_t>(),
          .num_top = num_top,
          .top_ids_stride_row = top_ids.stride(0),
          .top_logprobs_stride_row = top_logprobs.stride(0)};
}

}  // namespace pagedkv::ops
