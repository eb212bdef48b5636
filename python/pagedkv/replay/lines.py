"""A recording is a text file of JSON lines: a header, then arrivals, aborts, forks and steps as
they happened. Here is how they are written; recording.py reads them back.

A line holds no text of a prompt or an answer, no stop string, no seed and no cache_salt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from pagedkv import __version__
from pagedkv.block_manager import BlockManager, Statistics
from pagedkv.config import EngineConfig
from pagedkv.records import FinishedRequest, RunFacts
from pagedkv.request import Request

FORMAT = "pagedkv recording"
VERSION = 1

_COUNTERS = [name for name in dir(Statistics) if not name.startswith("_")]


def header(config: EngineConfig, facts: RunFacts, *, is_plain: bool) -> dict[str, Any]:
    """The first line: everything that replaying the same decisions takes."""
    return {
        "kind": "header",
        "format": FORMAT,
        "version": VERSION,
        "pagedkv": __version__,
        "tokens": "ids" if is_plain else "pseudonyms",
        "cache": plain(config.cache),
        "scheduler": plain(config.scheduler),
        "facts": plain(facts),
    }


def request_line(
    request: Request, prompt: list[int], stop_ids: list[int], salt: str | None
) -> dict[str, Any]:
    """What of a request decides how it is scheduled. prompt, stop_ids, salt: as recorded."""
    params = request.sampling_params
    return {
        "request_id": request.request_id,
        "prompt": prompt,
        "max_tokens": request.max_tokens,
        "stop_ids": stop_ids,
        "cache_salt": salt,
        "priority": request.priority,
        "n": params.n,
        "best_of": params.best_of,
        "beam_width": params.beam_width,
        "length_penalty": params.length_penalty,
        "early_stopping": params.early_stopping,
        "user": request.user,
    }


def note_line(request: Request, kind: str, num_step: int, numbers: dict[str, Any]) -> Any:
    return {
        "request_id": request.request_id,
        "parent_id": request.parent_id,
        "kind": kind,
        "step": num_step,
        "numbers": plain(numbers),
    }


def ended_lines(ended: Iterable[FinishedRequest]) -> list[dict[str, Any]]:
    return [
        {
            "request_id": one.request.request_id,
            "parent_id": one.request.parent_id,
            "reason": one.reason,
            "error": one.error,
            "num_generated": int(one.token_ids.size),
            "num_cached_tokens": one.num_cached_tokens,
            "num_preemptions": one.num_preemptions,
        }
        for one in ended
    ]


def counters(manager: BlockManager) -> dict[str, Any]:
    """Every number of the manager's statistics, by its name there."""
    statistics = manager.statistics()
    return {name: getattr(statistics, name) for name in _COUNTERS}


def plain(value: Any) -> Any:
    """A record as JSON has it, whatever fields it has: dataclasses by their fields, arrays as
    lists, a request by its id.
    """
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Request):
        return value.request_id
    if dataclasses.is_dataclass(value):
        return {one.name: plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    raise TypeError(f"a record holds {value!r}, which has no form in a recording")
