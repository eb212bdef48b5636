"""How long a step of Llama-3.1-8B takes on one H200, for runs without one. Coefficients from four
measured rows, three of them of revision 254a0ea, which the kept table no longer shows (`git show
b7c4ebb:benchmarks/results/2026-11-30-throughput.md` does):

* bs32, "in all": 5,596 us for 32 rows that read 711 us of keys;
* mixed256, "in all": 13,287 us for 256 rows that read 5,527 us of keys. So a row takes 12.85 us and
  the step itself, weights above all, 4,474;
* attention of mixed256: its keys at the 4.29 TB/s of 2026-11-30-paged-attention.md, 131,072 bytes
  a token: 0.0306 us;
* prefill64x4000: 41,560 tokens a second, of which attention is a fifteenth (1.0 of 15.0 GFLOP).

A single row is faster than this by a sixth (kernels of its own), and since then 32 rows are by a
seventh (4,793 us in all). measure_throughput.py compares the model with the measured mixed256.
"""

from __future__ import annotations

from pagedkv.records import RunFacts
from pagedkv.replay.step_times import FitError, StepTimes

BYTES_PER_TOKEN = 2 * 32 * 8 * 128 * 2  # K and V, layers, KV heads, head_dim, bf16
READ_BYTES_PER_S = 4.29e12
COPY_BYTES_PER_S = 2.12e12  # of content: it is read and written at 4.24 TB/s together
ROW_S = ((13_287 - 5_527) - (5_596 - 711)) / (256 - 32) * 1e-6
STEP_S = (5_596 - 711) * 1e-6 - 32 * ROW_S
KEY_S = BYTES_PER_TOKEN / READ_BYTES_PER_S
_CHUNK = 8192  # tokens of a step of prefill64x4000
_CHUNK_S = _CHUNK / 41_560 - STEP_S
PREFILL_TOKEN_S = _CHUNK_S * 14 / 15 / _CHUNK
PAIR_S = _CHUNK_S / 15 / (_CHUNK * 2000)  # a token of 4,000 sees 2,000 keys on average


def step_times(block_size: int) -> StepTimes:
    """For pagedkv.replay. Nothing is fitted here, so there is no error of a fit."""
    return StepTimes(
        coefficients_s=(STEP_S, ROW_S, KEY_S, PREFILL_TOKEN_S, PAIR_S, 0.0, 1 / COPY_BYTES_PER_S),
        gap_s=0.0,
        error=FitError(0.0, 0.0, 0.0, 0),
        unseen=(),
        largest=_CHUNK,
        bytes_per_block=BYTES_PER_TOKEN * block_size,
    )


def facts(num_blocks: int, max_model_len: int) -> RunFacts:
    return RunFacts(
        "Llama-3.1-8B", "bfloat16", 32, 8, 128, BYTES_PER_TOKEN, max_model_len, num_blocks, 0
    )
