"""Mixed steps on the GPU: decodes and a prefill in one call, against the sum of the two alone.

bf16, block 16, head_dim 128, 32 query and 8 KV heads, shuffled blocks, inputs larger than the L2 in
rotation. `x baseline` of the mixed row is the sum of the two alone over the time of the one call.
The mixed call is checked against the two before it is timed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

import rows
from bench_paged_attention import BLOCK, DIM, Pool, Shape, decode, operands
from gpu_timing import graph_us
from pagedkv.ops import paged_attention, paged_attention_workspace_size

MOST = 0.95  # of the sum
SETS = 3


def mixed(decodes: dict[str, object], prefill: dict[str, object]) -> dict[str, object]:
    """One call of the two: the decodes' rows first."""
    both = dict(prefill)
    for name in ("query", "block_tables", "seq_lens"):
        both[name] = torch.cat([decodes[name], prefill[name]])  # type: ignore[list-item]
    first, second = decodes["query_start_loc"], prefill["query_start_loc"]
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    both["query_start_loc"] = torch.cat([first, second[1:] + first[-1]])
    return both


def mixed_rows(decodes: Shape, prefill: Shape) -> list[rows.Row]:
    needed = [shape.batch * -(-shape.length // BLOCK) for shape in (decodes, prefill)]
    pool = Pool(decodes, SETS * sum(needed) + 64)
    ids = torch.randperm(pool.num_blocks, device="cuda")[: SETS * sum(needed)].int()
    workspace = torch.empty(
        paged_attention_workspace_size(
            decodes.batch + prefill.batch * prefill.new, decodes.num_heads, DIM, device="cuda"
        ),
        dtype=torch.uint8,
        device="cuda",
    )
    calls: dict[str, list[Callable[[], object]]] = {"decode": [], "prefill": [], "mixed": []}
    for mine in ids.split(sum(needed)):
        alone = [
            operands(shape, pool, part)
            for shape, part in zip((decodes, prefill), mine.split(needed), strict=True)
        ]
        outs = []
        for made, call in zip(calls.values(), [*alone, mixed(*alone)], strict=True):
            out = torch.empty_like(call["query"])  # type: ignore[call-overload]
            made.append(
                lambda c=call, o=out: paged_attention(o, None, workspace=workspace, **c)  # type: ignore[misc]
            )
            made[-1]()
            outs.append(out)
        torch.testing.assert_close(outs[2], torch.cat(outs[:2]), rtol=0.02, atol=0.02)
    us = {name: graph_us(made) for name, made in calls.items()}
    total = us["decode"] + us["prefill"]
    return [
        rows.Row("decode alone", decodes.words, us["decode"]),
        rows.Row("prefill alone", prefill.words, us["prefill"]),
        rows.Row(
            "mixed step",
            f"{decodes.words} and {prefill.words}",
            us["mixed"],
            baseline=total / us["mixed"],
            limit=f"<= {MOST * total:.4g} us",
            holds=us["mixed"] <= MOST * total,
        ),
    ]


def main() -> int:
    options = rows.parser(__doc__.splitlines()[0]).parse_args()
    made = mixed_rows(decode(64, 2048, 0.0), Shape(1, 2048, 0))
    return rows.report("mixed-steps", made, save=options.save)


if __name__ == "__main__":
    sys.exit(main())
