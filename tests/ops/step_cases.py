"""Random calls of advance_step."""

from __future__ import annotations

import torch
from calls import draw_params


def random_call(
    seed: int, block_size: int, device: torch.device | str = "cpu"
) -> dict[str, object]:
    """Six slots of 5 blocks; some rows padding or without tokens or samples; outputs poisoned."""
    source = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=source))

    num_slots, width = 6, 5
    num_rows, num_padding = number(0, 6), number(0, 3)
    slots = torch.randperm(num_slots, generator=source)[:num_rows]
    lens = torch.randint(0, width * block_size + 1, (num_slots,), generator=source)
    query_lens = [number(0, int(width * block_size - lens[slot])) for slot in slots]
    num_samples = [number(0, 3) for _ in range(num_rows + num_padding)]
    query_lens += [number(0, 2) for _ in range(num_padding)]
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    sample_starts = torch.tensor([0, *num_samples]).cumsum(0)
    known = int(starts[num_rows])
    num_pending = number(0, known)
    token_ids = torch.randint(-1, 50, (known - num_pending + number(0, 2),), generator=source)
    rows, samples = num_rows + num_padding, int(sample_starts[-1]) + number(0, 2)
    # As the engine has them: parts of wider tensors.
    call = {
        "lens": lens,
        "tokens": torch.full((3, int(starts[-1]) + 7), -7)[:, : int(starts[-1]) + number(0, 2)],
        "block_tables": torch.full((rows, width + 2), 99, dtype=torch.int32)[:, :width],
        "seq_lens": torch.full((rows,), -7),
        "samples": torch.full((6, samples + 3), -7)[:, :samples],
        "filters": torch.full((2, samples + 3), -7.0, dtype=torch.float64)[:, :samples],
        "inverse_temperatures": torch.full((samples,), -7.0),
        "counts": torch.tensor([num_rows, num_pending]),
        "slots": torch.cat([slots, torch.full((num_padding,), 99)]),
        "query_start_loc": starts,
        "sample_start_loc": sample_starts,
        "tables": torch.randint(0, 1000, (num_slots, width), generator=source),
        "draws": torch.arange(num_slots) * 3,
        "params": draw_params(),
        "latest": torch.arange(60, 61 + num_slots),
        "token_ids": token_ids,
    }
    made: dict[str, object] = {"block_size": block_size}
    for name, one in call.items():
        is_long = name in ("tokens", "samples", "latest") or one.is_floating_point()
        made[name] = (one if is_long else one.int()).to(device)
    return made
