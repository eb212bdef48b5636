// The schema of every op, in one place. CPU and CUDA implementations register against these names
// from their own files; Python documents them in python/pagedkv/ops. Shapes and dtypes, which a
// schema cannot say, stand above each one.
//
// Words: T tokens, S sequences, H query heads, G key/value heads, D head_dim, B block_size, N
// num_blocks, L layers. key_cache, value_cache [N, G, B, D], any strides with a contiguous last
// dimension. A cache is fp32, bf16, fp16, or fp8 (e4m3fn, e5m2). k_scale, v_scale fp32 [1] or [G]:
// stored value * scale = real value; required with an fp8 cache, refused with any other.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(pagedkv, library) {
  // key, value [T', G, D] with T' >= T; slot_mapping [T] int64, slot = block_id * B + offset,
  // negative writes nothing.
  library.def(
      "reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
      "Tensor slot_mapping, *, "
      "Tensor? k_scale=None, Tensor? v_scale=None) -> ()");

  // rotary_embedding and reshape_and_cache in one pass, with the same result: query [T, H, D] in
  // place; key, value [T, G, D] are read only; positions, slot_mapping int64 [T]. residual [T,
  // hidden]: before, all three are multiplied by 1 / sqrt(mean(residual^2) + residual_epsilon) of
  // their row; bias [(H + 2 G) * D]: and then it is added.
  library.def(
      "fused_rotary_reshape_and_cache(Tensor positions, Tensor(a!) query, Tensor key, Tensor "
      "value, Tensor cos_sin_cache, Tensor(b!) key_cache, Tensor(c!) value_cache, Tensor "
      "slot_mapping, bool is_neox=True, *, Tensor? residual=None, float residual_epsilon=0.0, "
      "Tensor? "
      "bias=None, Tensor? k_scale=None, Tensor? v_scale=None) -> ()");

  // The same with an RMS norm of every query and key head before: query_norm, key_norm [D].
  library.def(
      "fused_norm_rotary_reshape_and_cache(Tensor positions, Tensor(a!) query, Tensor key, Tensor "
      "value, Tensor query_norm, Tensor key_norm, float epsilon, Tensor cos_sin_cache, Tensor(b!) "
      "key_cache, Tensor(c!) value_cache, Tensor slot_mapping, bool is_neox=True, *, Tensor? "
      "residual=None, float residual_epsilon=0.0, Tensor? bias=None, Tensor? k_scale=None, Tensor? "
      "v_scale=None) -> ()");

  // out, query [T, H, D]; lse fp32 [T, H], natural log, -inf for an empty row; block_tables int32
  // [S, max_num_blocks]; seq_lens int32 [S] (this step's tokens included); query_start_loc int32 [S
  // + 1]. window 0: unlimited. soft_cap 0: none. alibi_slopes fp32 [H]. num_splits 0: chosen by the
  // op, 1: one pass (PagedAttention v1), n: n pieces of each sequence, merged in order (v2).
  // prefix_groups int32 [num_groups, 3], rows (first_seq, num_seqs, num_prefix_blocks): those
  // sequences' tables begin with the same num_prefix_blocks blocks; groups do not overlap; num_seqs
  // 0 is an empty entry. workspace: uint8, as large as paged_attention_workspace_size says, or none
  // (the op then allocates).
  library.def(
      "paged_attention(Tensor(a!) out, Tensor(b!)? lse, Tensor query, Tensor key_cache, Tensor "
      "value_cache, Tensor block_tables, "
      "Tensor seq_lens, Tensor query_start_loc, *, int max_query_len, float scale, bool "
      "causal=True, int window=0, "
      "Tensor? alibi_slopes=None, float soft_cap=0.0, Tensor? k_scale=None, Tensor? v_scale=None, "
      "int num_splits=0, "
      "Tensor? prefix_groups=None, Tensor(c!)? workspace=None) -> ()");

  // Bytes of workspace for at most num_tokens query tokens; num_workers: torch's threads on the
  // CPU, the fixed grid on a GPU.
  library.def(
      "paged_attention_workspace_size(int num_workers, int num_tokens, int num_heads, int "
      "head_dim, int num_splits, "
      "int num_prefix_groups) -> int");

  // out, out_a, out_b [T, H, D]; lse, lse_a, lse_b fp32 [T, H]. The softmax-weighted union of two
  // disjoint sets of keys.
  library.def(
      "merge_attention_states(Tensor(a!) out, Tensor(b!)? lse, Tensor out_a, Tensor lse_a, Tensor "
      "out_b, Tensor lse_b) -> ()");

  // kv_cache [L, 2, N, G, B, D]; pairs int64 [n, 2] on the CPU, (source block, destination block).
  // All layers, one launch.
  library.def("copy_blocks(Tensor(a!) kv_cache, Tensor pairs) -> ()");
  // source, destination [L, 2, N_i, G, B, D], on two devices or one; pairs int64 [n, 2] on the CPU.
  library.def("swap_blocks(Tensor source, Tensor(a!) destination, Tensor pairs) -> ()");
  // key, value [T, G, D]; block_tables int32 [S, max_num_blocks]; seq_start_loc int32 [S + 1]:
  // sequence i fills rows seq_start_loc[i] .. seq_start_loc[i + 1] with its first tokens.
  library.def(
      "gather_blocks(Tensor(a!) key, Tensor(b!) value, Tensor key_cache, Tensor value_cache, "
      "Tensor block_tables, "
      "Tensor seq_start_loc, *, Tensor? k_scale=None, Tensor? v_scale=None) -> ()");

  // out, input [T, hidden]; weight [hidden].
  library.def("rms_norm(Tensor(a!) out, Tensor input, Tensor weight, float epsilon) -> ()");
  // residual <- residual + input; input <- rms_norm(residual).
  library.def(
      "fused_add_rms_norm(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float epsilon) -> "
      "()");
  // positions int64 [T]; query [T, H, D], key [T, G, D] in place; cos_sin_cache fp32 [max_position,
  // rotary_dim], cosines then sines, rotary_dim even and <= D. is_neox: halves are rotated against
  // each other; otherwise neighbours (GPT-J).
  library.def(
      "rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!) key, Tensor cos_sin_cache, "
      "bool is_neox=True) -> ()");
  // out [T, F]; input [T, 2 F]: act(input[:, :F]) * input[:, F:]. approximate: "none" (erf) or
  // "tanh". residual [T, hidden]: input's rows are multiplied before, as above.
  library.def(
      "silu_and_mul(Tensor(a!) out, Tensor input, *, Tensor? residual=None, float "
      "residual_epsilon=0.0) -> ()");
  library.def(
      "gelu_and_mul(Tensor(a!) out, Tensor input, str approximate=\"none\", *, Tensor? "
      "residual=None, float residual_epsilon=0.0) -> ()");

  // out [T, N], or [T, N / 2] for epilogue "silu_and_mul"; input [T, K]; weight [N, K]; bias [N].
  // norm_weight [K]: the product is of rms_norm(input). epilogue: "store", "add" (into out) or
  // "silu_and_mul" (of the halves of the product, gate first). For few rows, 64 at most on a GPU.
  library.def(
      "streamed_linear(Tensor(a!) out, Tensor input, Tensor weight, *, Tensor? bias=None, Tensor? "
      "norm_weight=None, float epsilon=0.0, str epilogue=\"store\") -> ()");

  // token_ids int64 [n], -1 in rows without usable logits; cuts fp32 [n]: the smallest logit of
  // each row that could be chosen; logits [n, vocab_size]; inverse_temperatures fp32 [n], 0 for
  // greedy rows; top_k int64, top_p, min_p fp64 [n]; seeds, positions, draws int64 [n]: what a
  // row's random number is a function of. Row i's edits are entries edit_start_loc[i] ..
  // edit_start_loc[i + 1] (int32 [n + 1]) of edit_ids int32 [num_edits], ascending, and edit_values
  // fp32 [num_edits, 3]; ids 2^31 - 1 at a row's end edit nothing; is_limited int32 [n]: ids
  // without an edit are not chosen.
  library.def(
      "sample_tokens(Tensor(a!) token_ids, Tensor(b!)? cuts, Tensor logits, Tensor "
      "inverse_temperatures, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds, Tensor "
      "positions, Tensor draws, *, Tensor? edit_start_loc=None, Tensor? edit_ids=None, Tensor? "
      "edit_values=None, Tensor? is_limited=None) -> ()");
  // logprobs fp64 [n], ranks int64 [n] of token_ids int64 [n] in logits [n, vocab_size]; top_ids
  // int64, top_logprobs fp64 [n, num_top]: the most likely tokens, best first.
  library.def(
      "score_tokens(Tensor(a!) logprobs, Tensor(b!) ranks, Tensor(c!) top_ids, Tensor(d!) "
      "top_logprobs, Tensor logits, Tensor token_ids) -> ()");

  // From what a device keeps of the running sequences, by slot (N slots, M = max_num_blocks), to
  // the inputs of a step of R rows, T tokens and n samples; int32 where nothing else is said. lens
  // [N]; tokens int64 [3, T]: input ids, positions, slot_mapping; block_tables [R, up to M];
  // seq_lens [R]; samples int64 [6, n]: rows of the logits, slots, top_k, seeds, positions, draws;
  // filters fp64 [2, n]: top_p, min_p; inverse_temperatures fp32 [n]. counts [2]: rows that are no
  // padding, leading tokens that are latest; slots [R]; query_start_loc, sample_start_loc [R + 1];
  // tables [N, M]; draws [N]; params [N, 8]: inverse temperature fp32, top_k int32, top_p, min_p
  // fp64, seed int64; latest int64 [N + 1]; token_ids [num_token_ids], -1: latest.
  library.def(
      "advance_step(Tensor(a!) lens, Tensor(b!) tokens, Tensor(c!) block_tables, Tensor(d!) "
      "seq_lens, Tensor(e!) samples, Tensor(f!) filters, Tensor(g!) inverse_temperatures, Tensor "
      "counts, Tensor slots, Tensor query_start_loc, Tensor sample_start_loc, Tensor tables, "
      "Tensor "
      "draws, Tensor params, Tensor latest, Tensor token_ids, *, int block_size) -> ()");

  // From the edits of one step, last_ids, last_counts int32 [m0], last_values fp32 [m0, 3], to
  // those of the next: ids, counts int32 [m], values fp32 [m, 3], as sample_tokens has them; of row
  // i from start_loc[i] (int32 [n + 1]) on. rows int32 [n, 8]: source, its length, slot (-1: none)
  // whose latest int64 [num_slots] is counted, repetition fp32, frequency and presence fp64.
  // source: an entry of the last step's or, as -1 - i, entry i of sent int32 [k, 3]: id, count,
  // bias fp32.
  library.def(
      "advance_edits(Tensor(a!) ids, Tensor(b!) counts, Tensor(c!) values, Tensor start_loc, "
      "Tensor "
      "is_limited, Tensor rows, Tensor latest, Tensor last_ids, Tensor last_counts, Tensor "
      "last_values, Tensor sent) -> ()");

  // target uint8 [num_bytes] <- the bytes of an open file from offset on; staging uint8
  // [staging_bytes], pinned, for a target on a GPU alone. All is done when it returns, and the
  // current stream's earlier work too: it is not for graphs.
  library.def(
      "read_file(Tensor(a!) target, int fd, int offset, *, Tensor(b!)? staging=None) -> ()");
}
