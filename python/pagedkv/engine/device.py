"""Where the engine runs: the option `device` as a torch device; what a GPU's memory holds."""

from __future__ import annotations

import torch

from pagedkv.ops import library


def resolve_device(option: str) -> torch.device:
    """auto, cpu, cuda or cuda:N as a device that is there. A CUDA device has an index.

    Raises:
        ValueError: a GPU is asked for that is not there, or pagedkv's CUDA library is not built.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    has_library = (library.FOLDER / "_ops_cuda.so").exists()
    if option == "auto":
        option = "cuda" if num_gpus and has_library else "cpu"
    device = torch.device(option)
    if device.type == "cpu":
        return device
    if device.index is None and num_gpus:
        device = torch.device("cuda", torch.cuda.current_device())
    if num_gpus == 0 or device.index >= num_gpus:
        raise ValueError(
            f"device is {option!r}, but torch {torch.__version__} finds {num_gpus} GPUs"
        )
    if not has_library:
        raise ValueError(
            f"device is {option!r}, but pagedkv's CUDA library is not built: "
            f"{library.CUDA_BUILD_HINT}"
        )
    return device


def bytes_left(device: torch.device, utilization: float, peak_bytes: int) -> int:
    """What is left of a GPU's memory under utilization, when torch holds peak_bytes at its peak and
    others go on holding what they hold now. May be negative.
    """
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return int(utilization * total) - others - peak_bytes
