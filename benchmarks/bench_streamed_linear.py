"""streamed_linear on the GPU at 1 to 256 rows of Llama-3.1-8B's and Qwen3-0.6B's matrices, against
torch.nn.functional.linear, which is cuBLAS.

Bytes are those of the weights: out_features * in_features * 2. A percentage is of the measured read
rate; `x baseline` is cuBLAS's time for the product alone over that of the op, with its sum or gate.
Weights rotate, so that each call reads them from memory. Every shape is compared with the oracle
before it is timed.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
from torch.nn import functional

import rows
from gpu_timing import L2_BYTES, Ceilings, graph_us, measure_ceilings
from pagedkv import ops
from pagedkv.ops import reference

ROWS = (1, 2, 4, 8, 9, 16, 24, 32, 48, 64, 72, 96, 128, 136, 160, 192, 224, 256)
CALLS = 24  # of each form, in one graph


class Matrix(NamedTuple):
    name: str
    out_features: int
    in_features: int
    epilogue: str


SHAPES = {
    "Llama-3.1-8B": [
        Matrix("QKV", 6144, 4096, "store"),
        Matrix("output", 4096, 4096, "add"),
        Matrix("gate-up", 28672, 4096, "silu_and_mul"),
        Matrix("down", 4096, 14336, "add"),
        Matrix("logits", 128256, 4096, "store"),
    ],
    "Qwen3-0.6B": [
        Matrix("QKV", 4096, 1024, "store"),
        Matrix("output", 1024, 2048, "add"),
        Matrix("gate-up", 6144, 1024, "silu_and_mul"),
        Matrix("down", 1024, 3072, "add"),
        Matrix("logits", 151936, 1024, "store"),
    ],
}


def measure(model: str, matrix: Matrix, ceilings: Ceilings) -> list[rows.Row]:
    name, n, k, epilogue = matrix
    sets = max(2, 4 * L2_BYTES // (n * k * 2))
    weights = [
        torch.randn(n, k, device="cuda", dtype=torch.bfloat16).mul_(k**-0.5) for _ in range(sets)
    ]
    columns = n // 2 if epilogue == "silu_and_mul" else n
    repeats = max(1, CALLS // sets)
    made = []
    for num_rows in ROWS:
        x = torch.randn(num_rows, k, device="cuda", dtype=torch.bfloat16)
        out = torch.zeros(num_rows, columns, device="cuda", dtype=torch.bfloat16)
        want = out.float()
        ops.streamed_linear(out, x, weights[0], epilogue=epilogue)
        reference.streamed_linear(want, x.float(), weights[0].float(), epilogue=epilogue)
        error = (out - want).abs().max().item()
        assert error <= 0.02 * want.abs().max().item(), f"{model} {name}: off by {error:.3g}"
        us = graph_us(
            [
                lambda w=w, o=out, x=x: ops.streamed_linear(o, x, w, epilogue=epilogue)
                for w in weights
            ],
            repeats=repeats,
        )
        torch_us = graph_us(
            [lambda w=w, x=x: functional.linear(x, w) for w in weights], repeats=repeats
        )
        rate = n * k * 2 / us * 1e6
        made.append(
            rows.Row(
                f"{model} {name}, {epilogue}",
                f"{num_rows} x {k} x {n}",
                us,
                f"{rate / 1e12:.2f} TB/s",
                100 * rate / ceilings.read,
                torch_us / us,
            )
        )
    return made


def main() -> int:
    options = rows.parser(__doc__.splitlines()[0]).parse_args()
    ceilings = measure_ceilings()
    made = []
    for model, matrices in SHAPES.items():
        for matrix in matrices:
            made += measure(model, matrix, ceilings)
            torch.cuda.empty_cache()
    notes = [f"Measured read rate {ceilings.read / 1e12:.2f} TB/s."]
    return rows.report("streamed-linear", made, save=options.save, notes=notes)


if __name__ == "__main__":
    sys.exit(main())
