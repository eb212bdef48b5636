"""Choosing tokens on the GPU: sample_tokens on bf16 logits of Llama-3's and Qwen3's vocabulary.

Bytes: rows * vocabulary * 2, each logit once. A percentage is of the measured read rate; `x
baseline` is against torch: argmax, softmax and multinomial, or a sort for the filters. Logits are
normal with a deviation of 2.5; "peaked" ones have 30 tokens 8 to 12 above that, as a language
model's have. Each call is compared with the oracle before it is timed.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import Tensor

import rows
from gpu_timing import L2_BYTES, Ceilings, graph_us, measure_ceilings
from pagedkv import ops
from pagedkv.ops.reference_sampling import filtered_weights

VOCABULARIES = {"Llama-3": 128_256, "Qwen3": 151_936}
NUM_ROWS = (1, 32, 256, 1024)
# (inverse temperature, top_k, top_p, min_p), and whether logits are peaked.
KINDS: dict[str, tuple[tuple[float, int, float, float], bool]] = {
    "greedy": ((0.0, 0, 1.0, 0.0), False),
    "temperature": ((1.25, 0, 1.0, 0.0), False),
    "min_p": ((1.25, 0, 1.0, 0.05), False),
    "top_k 50": ((1.25, 50, 1.0, 0.0), False),
    "top_k 50, top_p 0.9": ((1.25, 50, 0.9, 0.0), True),
    "top_p 0.95, peaked": ((1.0, 0, 0.95, 0.0), True),
    "top_p 0.95, flat": ((1.0, 0, 0.95, 0.0), False),
}
# Of the read rate, for large batches.
AT_LEAST = {"greedy": 60.0, "temperature": 50.0}


def operands(num_rows: int, options: tuple[float, int, float, float]) -> dict[str, Tensor]:
    inverse, top_k, top_p, min_p = options

    def filled(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device="cuda")

    return {
        "inverse_temperatures": filled(inverse, torch.float32),
        "top_k": filled(top_k, torch.int64),
        "top_p": filled(top_p, torch.float64),
        "min_p": filled(min_p, torch.float64),
        "seeds": torch.arange(num_rows, device="cuda"),
        "positions": filled(7, torch.int64),
        "draws": filled(0, torch.int64),
    }


def made_logits(num_rows: int, vocab_size: int, peaked: bool) -> Tensor:
    logits = torch.randn(num_rows, vocab_size, device="cuda") * 2.5
    if peaked:
        ids = torch.randint(0, vocab_size, (num_rows, 30), device="cuda")
        logits.scatter_add_(1, ids, 8 + 4 * torch.rand(num_rows, 30, device="cuda"))
    return logits.bfloat16()


def choose(logits: Tensor, given: dict[str, Tensor], cuts: Tensor | None = None) -> Tensor:
    token_ids = torch.empty(len(logits), dtype=torch.int64, device="cuda")
    ops.sample_tokens(token_ids, cuts, logits, **given)
    return token_ids


def check(logits: Tensor, options: tuple[float, int, float, float]) -> None:
    """The first rows' sets of tokens are the oracle's, but for the rounding of sums."""
    cuts = torch.empty(len(logits), device="cuda")
    token_ids = choose(logits, operands(len(logits), options), cuts)
    inverse, top_k, top_p, min_p = options
    for i, row in enumerate(logits[:2].float().cpu().numpy()):
        if inverse == 0:
            assert token_ids[i] == row.argmax()
            continue
        kept = int((row >= float(cuts[i])).sum())
        near = (top_p,) if top_p == 1 else (top_p * (1 - 4e-6), top_p * (1 + 4e-6))
        sizes = [np.count_nonzero(filtered_weights(row, inverse, top_k, p, min_p)[0]) for p in near]
        assert sizes[0] <= kept <= sizes[-1], f"keeps {kept} tokens, {sizes} are right"


def by_torch(logits: Tensor, options: tuple[float, int, float, float]) -> Tensor:
    """Usual torch code for the same choice, with torch's own random numbers."""
    inverse, top_k, top_p, min_p = options
    if inverse == 0:
        return logits.argmax(1)
    values = logits.float() * inverse
    if top_k or top_p < 1:
        values, order = values.sort(dim=1, descending=True)
        probabilities = values.softmax(1)
        if top_k:
            probabilities = probabilities.where(values >= values[:, top_k - 1 : top_k], 0)
        before = probabilities.cumsum(1) - probabilities
        wanted = top_p * probabilities.sum(1, keepdim=True)
        probabilities = probabilities.where(before < wanted, 0)
        return order.gather(1, probabilities.multinomial(1))
    probabilities = values.softmax(1)
    if min_p:
        least = min_p * probabilities.amax(1, keepdim=True)
        probabilities = probabilities.where(probabilities >= least, 0)
    return probabilities.multinomial(1)


def kind_row(model: str, num_rows: int, kind: str, ceilings: Ceilings) -> rows.Row:
    options, peaked = KINDS[kind]
    vocab_size = VOCABULARIES[model]
    num_bytes = num_rows * vocab_size * 2
    sets = max(3, -(-2 * L2_BYTES // num_bytes))
    logits = made_logits(num_rows * sets, vocab_size, peaked).split(num_rows)
    check(logits[0], options)
    given = operands(num_rows, options)
    us = graph_us([lambda one=one: choose(one, given) for one in logits])
    baseline = None
    if model == "Llama-3" and num_rows <= 256:  # the others' sorts take seconds and tell no more
        some = logits[: max(1, 64 // num_rows)]
        baseline = graph_us([lambda one=one: by_torch(one, options) for one in some]) / us
    percent = 100 * num_bytes / us * 1e6 / ceilings.read
    least = AT_LEAST.get(kind) if num_rows >= 256 else None
    return rows.Row(
        kind,
        f"{model}: {num_rows} x {vocab_size}",
        us,
        f"{num_bytes / us * 1e6 / 1e12:.2f} TB/s",
        percent,
        baseline=baseline,
        limit=f">= {least:g} %" if least else "",
        holds=least is None or percent >= least,
    )


def main() -> int:
    options = rows.parser(__doc__.splitlines()[0]).parse_args()
    ceilings = measure_ceilings()
    made = [
        kind_row(model, num_rows, kind, ceilings)
        for model in VOCABULARIES
        for num_rows in NUM_ROWS
        for kind in KINDS
    ]
    notes = [f"Measured read rate {ceilings.read / 1e12:.2f} TB/s."]
    return rows.report("sampling", made, save=options.save, notes=notes)


if __name__ == "__main__":
    sys.exit(main())
