// One tile of 16 packed rows of one (sequence, KV head), or a part of its keys, as the mma.sync
// and the prefill kernels pass it around.
#pragma once

#include "cuda/attention/sequence.cuh"

namespace pagedkv::cuda {

constexpr int kTileRows = 16;

struct TilePart {
  int seq;
  Sequence sequence;
  int kv_head;
  int first_row;  // of the packed rows, a multiple of kTileRows
  int num_rows;   // 1 .. kTileRows
  int first_key;  // visible to any row of the sequence
  int base_key;   // first_key rounded down to a step's grain; step i begins at base_key + i * keys
  int num_steps;
  int step_begin;
  int step_end;
  int piece;  // for a caller's use
};

}  // namespace pagedkv::cuda
