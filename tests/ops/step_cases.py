"""Random calls of advance_step and advance_edits."""

from __future__ import annotations

import torch
from calls import draw_params, edit_rows_of

from pagedkv.ops.step import FORBIDDEN, NO_EDIT, UNSEEN


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


def random_edits_call(
    seed: int, longest: int, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """Lists of up to `longest` ids of both sources, some with room, some limited, some empty, at
    all places that a token can have in one; outputs poisoned."""
    source = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=source))

    num_rows, num_slots, vocab = number(0, 9), 10, max(4, 2 * longest)
    kinds = torch.tensor([FORBIDDEN, UNSEEN, 0, 1, 2, 300])
    entries: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    rows, sizes, limited, latest = [], [0], [], torch.zeros(num_slots, dtype=torch.int64)
    slots = torch.randperm(num_slots, generator=source)[:num_rows].tolist()
    for slot in slots:
        length, is_sent = number(0, longest), number(0, 1)
        ids = torch.randperm(vocab, generator=source)[:length].sort().values
        listed = torch.stack([ids, kinds[torch.randint(6, (length,), generator=source)]], dim=1)
        room = number(0, 2)
        if not is_sent:
            listed = torch.cat([listed, torch.tensor([[NO_EDIT, UNSEEN]]).expand(room, 2)])
        token = number(-1, vocab - 1)
        is_limited = number(0, 1)
        more = int(token >= 0 and not is_limited and token not in ids and len(listed) == length)
        begin = sum(map(len, entries[is_sent]))
        rows.append((-1 - begin if is_sent else begin, len(listed), slot if token >= 0 else -1))
        entries[is_sent].append(listed)
        limited.append(is_limited)
        latest[slot] = max(token, 0)
        sizes.append(len(listed) + more + number(0, 2))
    last, sent = (torch.cat([torch.zeros(0, 2, dtype=torch.int64), *one]) for one in entries)
    most = sum(sizes) + number(0, 2)
    bias = torch.randn(len(sent), 1, generator=source).view(torch.int32)
    last_values = torch.randn(len(last), 3, generator=source)
    last_values[last[:, 0] == NO_EDIT] = torch.tensor([0.0, 1, 0])
    call = {
        "ids": torch.full((most,), -7, dtype=torch.int32),
        "counts": torch.full((most,), -7, dtype=torch.int32),
        "values": torch.full((most, 3), -7.0),
        "start_loc": torch.tensor(sizes).cumsum(0).int(),
        "is_limited": torch.tensor(limited, dtype=torch.int32),
        "rows": edit_rows_of(*rows) if rows else torch.zeros(0, 8, dtype=torch.int32),
        "latest": latest,
        "last_ids": last[:, 0].int(),
        "last_counts": last[:, 1].int(),
        "last_values": last_values,
        "sent": torch.cat([sent.int(), bias], dim=1),
    }
    return {name: one.to(device) for name, one in call.items()}
