"""GPUs by name: what a plan must know of them. Others are described by numbers (`pagedkv plan
--memory --bandwidth --flops`).

memory_bytes is what CUDA reports (cudaMemGetInfo), which is less than the datasheet's: ECC and the
driver keep some. Rates are the datasheets' (no run is faster): of dense products in 16 bits, summed
in fp32, without sparsity.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Gpu:
    """memory_bytes: None on a CPU. bandwidth: bytes/s that its memory is read at; flops: FLOP/s of
    16-bit products. Either is None where it is not known. source: of the numbers.
    """

    name: str
    memory_bytes: int | None
    bandwidth: float | None
    flops: float | None
    source: str


def _gpu(name: str, memory_gib: float, tb_per_s: float, tflops: float, source: str) -> Gpu:
    return Gpu(name, int(memory_gib * _GIB), tb_per_s * 1e12, tflops * 1e12, source)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("h200", 139.8, 4.8, 989, "NVIDIA H200 datasheet (SXM)"),
        _gpu("h100", 79.1, 3.35, 989, "NVIDIA H100 datasheet (SXM)"),
        _gpu("h100-pcie", 79.1, 2.0, 756, "NVIDIA H100 datasheet (PCIe)"),
        _gpu("b200", 178.3, 8.0, 2250, "NVIDIA DGX B200 datasheet, an eighth"),
        _gpu("a100-80", 79.2, 2.039, 312, "NVIDIA A100 datasheet (SXM, 80 GB)"),
        _gpu("a100-40", 39.4, 1.555, 312, "NVIDIA A100 datasheet (SXM, 40 GB)"),
        _gpu("l40s", 44.4, 0.864, 362, "NVIDIA L40S datasheet"),
        _gpu("l4", 22.0, 0.300, 121, "NVIDIA L4 datasheet"),
        _gpu("a10", 22.0, 0.600, 125, "NVIDIA A10 datasheet"),
        _gpu("rtx-5090", 31.3, 1.792, 209.5, "NVIDIA RTX Blackwell architecture"),
        _gpu("rtx-4090", 23.6, 1.008, 165.2, "NVIDIA Ada architecture"),
        _gpu("rtx-3090", 23.6, 0.936, 71, "NVIDIA Ampere GA102 architecture"),
        Gpu("cpu", None, None, None, "no rates are known of a CPU"),
    )
}


def find_gpu(
    name: str | None,
    *,
    memory_bytes: int | None = None,
    bandwidth: float | None = None,
    flops: float | None = None,
) -> Gpu:
    """The GPU of that name with the numbers that are given instead of its own; without a name, one
    of the numbers alone.

    Raises:
        ValueError: there is none of that name, no memory is known, or a number is not above 0.
    """
    given = {"memory_bytes": memory_bytes, "bandwidth": bandwidth, "flops": flops}
    numbers = {key: value for key, value in given.items() if value is not None}
    for key, value in numbers.items():
        if not 0 < value < 1e30:
            raise ValueError(f"{key} must be above 0, got {value}")
    known = f"known are {', '.join(GPUS)}; others by --memory, --bandwidth and --flops"
    if name is None:
        if memory_bytes is None:
            raise ValueError(f"give a GPU: --gpu NAME or its --memory; {known}")
        return Gpu("a GPU", memory_bytes, bandwidth, flops, "as given")
    key = "-".join(name.lower().replace("_", " ").replace("-", " ").split())
    if key not in GPUS:
        raise ValueError(f"there is no GPU {name!r} in the table; {known}")
    gpu = GPUS[key]
    if gpu.memory_bytes is None and memory_bytes is not None:
        raise ValueError("--memory is of a GPU; a CPU's pool is sized by --kv-cache-memory-bytes")
    # What is given replaces what the table has.
    source = f"{gpu.source}; as given: {', '.join(numbers)}" if numbers else gpu.source
    return replace(
        gpu,
        source=source,
        memory_bytes=memory_bytes or gpu.memory_bytes,
        bandwidth=bandwidth or gpu.bandwidth,
        flops=flops or gpu.flops,
    )
