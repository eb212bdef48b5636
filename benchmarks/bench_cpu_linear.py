"""The product with a weight matrix on the CPU: as torch has it, and packed by oneDNN.

The sizes are those of SmolLM2-135M: Q, K and V together, the attention's output, gate and up
together, down, and the head over the vocabulary. Weights take turns, 128 MB of them, so that they
come from memory as in a model. Bytes: the weights once. FLOPs: 2 * rows * in * out.
The models use the packed form (python/pagedkv/models/linear.py); it must never be slower by more
than the noise of the machine.
"""

from __future__ import annotations

import statistics
import sys
import time
from itertools import cycle

import torch

import rows
from pagedkv.models.linear import Product, can_pack, packed_product, plain_product

SIZES = {  # in, out
    "qkv": (576, 960),
    "o": (576, 576),
    "gate_up": (576, 3072),
    "down": (1536, 576),
    "head": (576, 49152),
}
NUM_ROWS = (1, 4, 16, 32, 128, 2048)
WEIGHT_BYTES = 128 * 2**20
AT_LEAST = 0.9


def take_turns(x: torch.Tensor, products: list[Product], seconds: float) -> float:
    """Median microseconds of one product over at least so many seconds."""
    turns = cycle(products)
    for _ in range(3):
        next(turns)(x)
    times: list[float] = []
    while sum(times) < seconds or len(times) < 5:
        product = next(turns)
        begin = time.perf_counter()
        product(x)
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def measure(dtype: torch.dtype, name: str, num_rows: int, seconds: float) -> rows.Row:
    size_in, size_out = SIZES[name]
    copies = max(1, WEIGHT_BYTES // (size_in * size_out * dtype.itemsize))
    weights = [torch.randn(size_out, size_in).mul_(0.02).to(dtype) for _ in range(copies)]
    x = torch.randn(num_rows, size_in).to(dtype)
    plain = [plain_product(weight, None) for weight in weights]
    packed = [packed_product(weight, None) for weight in weights]
    torch.testing.assert_close(packed[0](x), plain[0](x), rtol=2e-2, atol=2e-2)
    theirs = take_turns(x, plain, seconds)
    ours = take_turns(x, packed, seconds)
    num_bytes = size_in * size_out * dtype.itemsize
    flops = 2 * num_rows * size_in * size_out
    return rows.Row(
        name=f"{name} {str(dtype).removeprefix('torch.')}",
        shape=f"{num_rows} x {size_in} x {size_out}",
        us=ours,
        rate=f"{num_bytes / ours / 1e3:.1f} GB/s, {flops / ours / 1e6:.3f} TFLOP/s",
        baseline=theirs / ours,
        limit=f">= {AT_LEAST}x",
        holds=theirs / ours >= AT_LEAST,
    )


def depends_on_neighbours(dtype: torch.dtype) -> str:
    """Whether a row's bits change with the number of rows that are multiplied with it."""
    weight, x = torch.randn(960, 576).to(dtype), torch.randn(2048, 576).to(dtype)
    found = {}
    for name, make in (("packed", packed_product), ("plain", plain_product)):
        product = make(weight, None)
        whole = product(x)
        same = all(torch.equal(product(x[:n]), whole[:n]) for n in (1, 2, 3, 7, 16, 33, 128, 1000))
        found[name] = "the same" if same else "different"
    listed = ", ".join(f"{name}: {what}" for name, what in found.items())
    return f"Bits of a row alone and among others, {dtype}: {listed}."


@torch.inference_mode()
def main() -> int:
    arguments = rows.parser(__doc__.splitlines()[0])
    arguments.add_argument("--seconds", type=float, default=0.15, help="per product and form")
    options = arguments.parse_args()
    dtypes = [
        dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(dtype, torch.device("cpu"))
    ]
    made = [
        measure(dtype, name, num_rows, options.seconds)
        for dtype in dtypes
        for name in SIZES
        for num_rows in NUM_ROWS
        if not (name == "head" and num_rows > 128)
    ]
    notes = [depends_on_neighbours(dtype) for dtype in dtypes]
    return rows.report("cpu-linear", made, save=options.save, notes=notes)


if __name__ == "__main__":
    sys.exit(main())
