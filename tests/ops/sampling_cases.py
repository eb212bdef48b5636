"""Cases of sample_tokens: logits of every kind that filters could stumble over, options of rows,
and what makes a choice right, against the oracle. Shared by the tests on CPU and GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv.ops.philox import uniform
from pagedkv.ops.reference_sampling import edited, filtered_weights
from pagedkv.ops.reference_sampling import score_tokens as score_oracle
from pagedkv.ops.step import NO_EDIT

# (temperature, top_k, top_p, min_p) of rows; temperature 0 is greedy.
OPTIONS = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (1e-5, 0, 1.0, 0.0),
    (0.7, 1, 1.0, 0.0),
    (1.3, 5, 1.0, 0.0),
    (1.0, 40, 1.0, 0.0),
    (1.0, 10**9, 0.9, 0.0),
    (1.0, 3000, 1.0, 0.0),
    (1.0, 0, 0.5, 0.0),
    (0.8, 0, 0.95, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 0, 1 - 2.0**-40, 0.0),
    (0.9, 40, 0.8, 0.0),
    (2.5, 700, 0.999, 0.0),
    (0.05, 0, 0.9, 0.0),
    (1.0, 0, 1.0, 0.02),
    (1.5, 0, 1.0, 1.0),
    (3.0, 50, 0.9, 1e-4),
    (30.0, 0, 0.7, 0.0),
]

LOGITS: dict[str, Callable[[np.random.Generator, int, int], NDArray[np.float64]]] = {
    "normal": lambda rng, n, vocab: rng.normal(size=(n, vocab)) * 3,
    "tied": lambda rng, n, vocab: np.round(rng.normal(size=(n, vocab)) * 2),
    "all equal": lambda rng, n, vocab: np.full((n, vocab), -1.5),
    "one stands out": lambda rng, n, vocab: _peaked(rng.normal(size=(n, vocab)), vocab // 2, 30),
    "best in one place": lambda rng, n, vocab: np.tile(-np.arange(vocab) / 50, (n, 1)),
    "few are possible": lambda rng, n, vocab: _few(rng.normal(size=(n, vocab)), rng),
    "huge": lambda rng, n, vocab: rng.normal(size=(n, vocab)) * 1e4,
    "all negative": lambda rng, n, vocab: rng.normal(size=(n, vocab)) - 500,
    "both zeros": lambda rng, n, vocab: np.where(rng.random((n, vocab)) < 0.5, -0.0, 0.0),
}


def _peaked(logits: NDArray[np.float64], at: int, by: float) -> NDArray[np.float64]:
    logits[:, at] += by
    return logits


def _few(logits: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    keep = rng.random(logits.shape) < 0.01
    keep[:, logits.shape[1] // 3] = True
    return np.where(keep, logits, -np.inf)


def made_call(
    kind: str, vocab: int, dtype: torch.dtype, *, repeats: int = 1, options: Any = OPTIONS
) -> dict[str, Any]:
    """A call of sample_tokens of as many rows as there are options, each so often."""
    rng = np.random.default_rng(vocab + len(kind))
    rows = list(options) * repeats
    columns = list(zip(*rows, strict=True))
    temperatures = np.array(columns[0])
    inverse = np.divide(1, temperatures, out=np.zeros(len(rows)), where=temperatures > 0)
    logits = torch.from_numpy(LOGITS[kind](rng, len(rows), vocab)).to(dtype)
    return {
        "token_ids": torch.full((len(rows),), 77),
        "cuts": torch.full((len(rows),), 77.0),
        "logits": logits,
        "inverse_temperatures": torch.from_numpy(inverse.astype(np.float32)),
        "top_k": torch.tensor(columns[1]),
        "top_p": torch.tensor(columns[2], dtype=torch.float64),
        "min_p": torch.tensor(columns[3], dtype=torch.float64),
        "seeds": torch.from_numpy(rng.integers(-(2**63), 2**63, len(rows))),
        "positions": torch.from_numpy(rng.integers(0, 2**20, len(rows))),
        "draws": torch.from_numpy(rng.integers(0, 128, len(rows))),
    }


def edit_rows(count: int, *rows: tuple[list[int], list[list[float]], bool]) -> dict[str, Any]:
    """The edits of `count` rows as operands: of each of the first rows its ids, their (bias,
    factor, taken), and whether it is limited to them; none of the others.
    """
    starts = np.zeros(count + 1, dtype=np.int32)
    starts[1 : len(rows) + 1] = np.cumsum([len(ids) for ids, _, _ in rows])
    starts[len(rows) + 1 :] = starts[len(rows)]
    limited = torch.zeros(count, dtype=torch.int32)
    limited[: len(rows)] = torch.tensor([is_limited for _, _, is_limited in rows])
    values = [value for _, some, _ in rows for value in some]
    return {
        "edit_start_loc": torch.from_numpy(starts),
        "edit_ids": torch.tensor([i for ids, _, _ in rows for i in ids], dtype=torch.int32),
        "edit_values": torch.tensor(values, dtype=torch.float32).reshape(-1, 3),
        "is_limited": limited,
    }


def random_edits(count: int, vocab: int, seed: int) -> dict[str, Any]:
    """Of each row another number of edits, up to all of the vocabulary, of every sort; behind some
    of them what edits nothing."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        size = min(vocab, (0, 1, 30, 600)[i % 4])
        ids = np.sort(rng.choice(vocab, size, replace=False)).tolist()
        values = np.stack([rng.normal(size=size), rng.uniform(0.5, 2, size), rng.normal(size=size)])
        values[2, rng.random(size) < 0.2] = np.inf
        nothing = 3 * (i % 3 == 1)
        listed = values.T.tolist() + [[9.0, 9.0, 9.0]] * nothing
        rows.append((ids + [NO_EDIT] * nothing, listed, i % 5 == 3))
    return edit_rows(count, *rows)


def logits_of(call: dict[str, Any]) -> NDArray[np.float32]:
    """fp32 [n, vocab_size], edits made."""
    rows: NDArray[np.float32] = call["logits"].float().cpu().numpy().copy()
    if call.get("edit_start_loc") is not None:
        starts = call["edit_start_loc"].tolist()
        for i, row in enumerate(rows):
            mine = slice(starts[i], starts[i + 1])
            ids, values = call["edit_ids"][mine].cpu(), call["edit_values"][mine].cpu()
            edited(row, ids, values, bool(call["is_limited"][i]))
    return rows


# What sums of fp32 weights may be off by.
ROUNDING = 4e-6


def assert_right(call: dict[str, Any]) -> None:
    """token_ids and cuts of a call that was made are what the oracle says: the same set of tokens
    left by the filters, and the token whose interval the row's number lies in. Sets are cuts of one
    order, so that equal sizes are equal sets; where the last group of equal logits reaches top_p
    but for rounding, it may be in or out.
    """
    keys = call["seeds"].cpu().numpy().view(np.uint64)
    numbers = uniform(keys, call["positions"].cpu().numpy(), call["draws"].cpu().numpy())
    for i, row in enumerate(logits_of(call)):
        token_id, cut = int(call["token_ids"][i]), float(call["cuts"][i])
        inverse, top_k, top_p, min_p = (
            call[name][i].item() for name in ("inverse_temperatures", "top_k", "top_p", "min_p")
        )
        where = f"row {i}, temperature {inverse and 1 / inverse}, {top_k=}, {top_p=}, {min_p=}"
        if not math.isfinite(row.max()):
            assert token_id == -1, where
            assert math.isnan(cut), where
            continue
        if inverse == 0:
            assert (token_id, cut) == (row.argmax(), row.max()), where
            continue
        nearby = [top_p] * 2
        if top_p < 1:
            nearby = [top_p * (1 - ROUNDING), min(top_p * (1 + ROUNDING), 1.0)]
        least, most = (
            int((row >= filtered_weights(row, inverse, top_k, one, min_p)[1]).sum())
            for one in nearby
        )
        num_kept = int((row >= cut).sum())
        assert least <= num_kept <= most, f"{where}: keeps {num_kept}, not {least} to {most}"
        weights, _ = filtered_weights(row, inverse, 0, 1.0, 0.0)
        weights[row < cut] = 0
        weights /= weights.sum()
        end = weights[: token_id + 1].sum()
        assert weights[token_id] > 0, where
        begin = end - weights[token_id]
        assert begin - ROUNDING <= numbers[i] <= end + ROUNDING, f"{where}: {token_id}"


def score_call(kind: str, vocab: int, dtype: torch.dtype, num_top: int) -> dict[str, Any]:
    """A call of score_tokens: of 9 rows the best token, the worst, others, and two without a
    logit."""
    rng = np.random.default_rng(vocab + len(kind))
    logits = torch.from_numpy(LOGITS[kind](rng, 9, vocab)).to(dtype)
    token_ids = torch.from_numpy(rng.integers(0, vocab, 9))
    token_ids[0], token_ids[1] = logits[0].argmax(), logits[1].argmin()
    token_ids[7], token_ids[8] = vocab, -1
    return {
        "logprobs": torch.full((9,), 77.0, dtype=torch.float64),
        "ranks": torch.full((9,), 77),
        "top_ids": torch.full((9, num_top), 77),
        "top_logprobs": torch.full((9, num_top), 77.0, dtype=torch.float64),
        "logits": logits,
        "token_ids": token_ids,
    }


def assert_scores(call: dict[str, Any], atol: float) -> None:
    """What a call of score_tokens has written is what the oracle writes; ids and ranks exactly."""
    want = {name: one.cpu().clone() for name, one in call.items()}
    score_oracle(**want)
    for name in ("ranks", "top_ids"):
        assert torch.equal(call[name].cpu(), want[name]), name
    for name in ("logprobs", "top_logprobs"):
        torch.testing.assert_close(
            call[name].cpu(), want[name], atol=atol, rtol=1e-12, equal_nan=True, msg=name
        )
