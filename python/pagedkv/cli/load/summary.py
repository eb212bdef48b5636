"""What a run's outcomes come to: latencies, rates, errors."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedkv.cli.load.client import Outcome

# Short names, as vLLM's, and what they stand for, in the order in which they are shown.
LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between two pieces",
    "e2el": "whole answer",
    "scheduled_ttft": "first token, from arrival",
    "scheduled_e2el": "answer, from arrival",
    "send_delay": "sent after arrival",
}
_GOALS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Spread:
    """Of values in seconds: mean, percentiles (linear between values), largest; 0 of none."""

    mean: float = 0.0
    median: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        if not values:
            return Spread()
        median, p90, p95, p99 = map(float, np.percentile(values, [50, 90, 95, 99]))
        return Spread(float(np.mean(values)), median, p90, p95, p99, max(values))


@dataclass(frozen=True, slots=True)
class Goals:
    """What a good request keeps to, in seconds; None: anything. ttft_s and e2el_s count from the
    scheduled arrival.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2el_s: float | None = None

    @staticmethod
    def parse(texts: Iterable[str]) -> Goals | None:
        """From "ttft:200", in milliseconds, as vLLM writes it; None if there are none.

        Raises:
            ValueError: a text of another form, or a name twice.
        """
        found: dict[str, float] = {}
        for text in texts:
            name, _, value = text.partition(":")
            if name not in _GOALS or not re.fullmatch(r"\d+(\.\d+)?", value) or name in found:
                raise ValueError(
                    f"goodput is NAME:MILLISECONDS with each of {', '.join(_GOALS)} once at most, "
                    f"got {text!r}"
                )
            found[name] = float(value) / 1e3
        if not found:
            return None
        return Goals(**{f"{name}_s": value for name, value in found.items()})

    def hold(self, outcome: Outcome) -> bool:
        given = (
            (self.ttft_s, outcome.piece_s[0] - outcome.scheduled_s),
            (self.tpot_s, per_token_s(outcome) or 0.0),
            (self.e2el_s, outcome.end_s - outcome.scheduled_s),
        )
        return all(most is None or value <= most for most, value in given)


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """Of a run. Latencies and tokens are those of completed requests; duration_s is from the first
    arrival to the last end. num_good: completed requests that keep to the goals; None without any.
    peak_concurrency: most requests at once.
    """

    completed: int
    failed: int
    errors: dict[str, int]
    duration_s: float
    total_input_tokens: int
    total_output_tokens: int
    num_good: int | None
    peak_concurrency: int
    latencies: dict[str, Spread]

    def per_second(self, count: float) -> float:
        return count / self.duration_s if self.duration_s > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """With vLLM's names; latencies in milliseconds."""
        tokens = self.total_input_tokens + self.total_output_tokens
        good = None if self.num_good is None else self.per_second(self.num_good)
        told: dict[str, Any] = {
            "completed": self.completed,
            "failed": self.failed,
            "errors": self.errors,
            "duration": self.duration_s,
            "total_input_tokens": self.total_input_tokens,
            "total_output_tokens": self.total_output_tokens,
            "request_throughput": self.per_second(self.completed),
            "request_goodput": good,
            "output_throughput": self.per_second(self.total_output_tokens),
            "total_token_throughput": self.per_second(tokens),
            "max_concurrent_requests": self.peak_concurrency,
        }
        for name, spread in self.latencies.items():
            for field in Spread.__slots__:
                told[f"{field}_{name}_ms"] = getattr(spread, field) * 1e3
        return told


def per_token_s(outcome: Outcome) -> float | None:
    """Seconds from one token to the next after the first; None: there was but one."""
    if outcome.num_output_tokens < 2:
        return None
    return (outcome.end_s - outcome.piece_s[0]) / (outcome.num_output_tokens - 1)


def gaps_s(outcome: Outcome) -> list[float]:
    """Between the pieces of an answer."""
    return [b - a for a, b in itertools.pairwise(outcome.piece_s)]


def latencies_s(outcomes: Iterable[Outcome]) -> dict[str, list[float]]:
    """All values of each of LATENCIES, of completed requests."""
    done = [one for one in outcomes if one.error is None]
    return {
        "ttft": [one.piece_s[0] - one.sent_s for one in done],
        "tpot": [found for one in done if (found := per_token_s(one)) is not None],
        "itl": [gap for one in done for gap in gaps_s(one)],
        "e2el": [one.end_s - one.sent_s for one in done],
        "scheduled_ttft": [one.piece_s[0] - one.scheduled_s for one in done],
        "scheduled_e2el": [one.end_s - one.scheduled_s for one in done],
        "send_delay": [one.sent_s - one.scheduled_s for one in done],
    }


def summarise(outcomes: Sequence[Outcome], goals: Goals | None = None) -> LoadSummary:
    """REQUIRES at least one outcome."""
    done = [one for one in outcomes if one.error is None]
    values = latencies_s(done)
    return LoadSummary(
        completed=len(done),
        failed=len(outcomes) - len(done),
        errors=dict(Counter(one.error for one in outcomes if one.error is not None).most_common()),
        duration_s=max(one.end_s for one in outcomes) - min(one.scheduled_s for one in outcomes),
        total_input_tokens=sum(one.num_prompt_tokens for one in done),
        total_output_tokens=sum(one.num_output_tokens for one in done),
        num_good=None if goals is None else sum(map(goals.hold, done)),
        peak_concurrency=max(level for _, level in in_flight(outcomes)),
        latencies={name: Spread.of(values[name]) for name in LATENCIES},
    )


def in_flight(outcomes: Iterable[Outcome]) -> list[tuple[float, int]]:
    """(time, requests from then on) at each begin and end; at one time, ends come first."""
    changes = sorted(change for one in outcomes for change in ((one.sent_s, 1), (one.end_s, -1)))
    level, found = 0, []
    for time_s, change in changes:
        level += change
        found.append((time_s, level))
    return found
