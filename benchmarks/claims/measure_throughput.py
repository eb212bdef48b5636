"""Throughput at equal memory and latency against request rate, in the replay simulator: the real
scheduler and managers, step times of Llama-3.1-8B on one H200 as h200.py has them, ShareGPT-like
requests. Throughput: what comes out in the first seconds under a full queue. Latency: of a request,
from its arrival to its end, over the tokens of its output, the mean of all that come in 40 s of a
Poisson process, in a pool of 20,000 tokens; each system is driven to the first rate at which that
is more than 0.1 s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from claims.figures import COLORS, axes
from claims.simulated import Setting, simulate, simulate_window
from claims.systems import MAX, ORACLE, PAGED, STATIC
from claims.tables import value
from claims.workloads import jobs_of
from rows import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SYSTEMS = (PAGED, ORACLE, MAX, STATIC)
POOLS = (20_000, 80_000, 320_000)
CLAIMED_POOL = 80_000
SECONDS = 12.0
RATED_POOL = 20_000
RATES = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 18, 20, 24, 32)
RATE_SECONDS = 40.0
MOST_PER_TOKEN_S = 0.1
KEPT_PER_TOKEN_S = 0.02  # the latency at which rates are compared
AT_LEAST = 2.0
MIXED256_S = 13.04  # measured: benchmarks/results/2026-11-30-throughput.md


def measure(*, quick: bool) -> list[Row]:
    pools = (20_000,) if quick else POOLS
    rates = (2, 8) if quick else RATES
    return [_model_row(), *_pool_rows(pools, 4.0 if quick else SECONDS), *_rate_rows(rates, quick)]


def _model_row() -> Row:
    """The model of step times against a run that it was not made from as a whole."""
    setting = Setting(840_000)
    seconds = simulate(PAGED, jobs_of("mixed256", 256), setting, watches=False).metrics.duration_s
    return Row(
        "model of step times",
        "mixed256, whole memory",
        seconds * 1e6,
        f"simulated {seconds:.2f} s, measured {MIXED256_S} s: {seconds / MIXED256_S - 1:+.1%}",
    )


def _pool_rows(pools: tuple[int, ...], seconds: float) -> list[Row]:
    """x baseline: paged over this."""
    made = []
    for pool in pools:
        jobs = jobs_of("ShareGPT-like", int(seconds * 110))
        windows = {
            system: simulate_window(system, jobs, Setting(pool), seconds) for system in SYSTEMS
        }
        for system, window in windows.items():
            factor = windows[PAGED].tokens_per_s / window.tokens_per_s
            is_claimed = pool == CLAIMED_POOL and system in (MAX, STATIC)
            made.append(
                Row(
                    system.name,
                    f"ShareGPT-like, {pool:,} tokens, {seconds:g} s",
                    0.0,
                    f"{window.tokens_per_s:,.0f} tok/s out, {window.requests_per_s:.1f} "
                    f"requests/s, {window.mean_running:.1f} sequences at once",
                    baseline=factor,
                    limit=f"paged >= {AT_LEAST:g} x" if is_claimed else "",
                    holds=factor >= AT_LEAST or not is_claimed,
                )
            )
    return made


def _rate_rows(rates: tuple[int, ...], quick: bool) -> list[Row]:
    made = []
    for system in SYSTEMS:
        last: tuple[float, float] | None = None
        kept = 0.0
        for rate in rates:
            seconds = 5.0 if quick else RATE_SECONDS
            jobs = jobs_of("ShareGPT-like", int(rate * seconds), rate=rate)
            outcome = simulate(system, jobs, Setting(RATED_POOL), watches=False)
            per_token_s = outcome.per_token_s
            made.append(
                Row(
                    system.name,
                    f"{rate} requests/s",
                    per_token_s * 1e6,
                    f"{per_token_s:.4f} s a token, first token after "
                    f"{outcome.metrics.ttft.p50:.3f} s (median), "
                    f"{outcome.mean_running:.1f} sequences at once",
                )
            )
            if per_token_s > KEPT_PER_TOKEN_S:
                kept = kept or _crossing(last, (rate, per_token_s))
            last = (rate, per_token_s)
            if per_token_s > MOST_PER_TOKEN_S:
                break
        words = f"{kept:.1f} requests/s" if kept else f"more than {rates[-1]} requests/s"
        name = f"at {KEPT_PER_TOKEN_S:g} s a token"
        made.append(Row(system.name, name, 0.0, f"{words}, by interpolation"))
    return made


def _crossing(below: tuple[float, float] | None, above: tuple[float, float]) -> float:
    """The rate at which the latency is KEPT_PER_TOKEN_S, on a line between two."""
    if below is None:
        return above[0]
    part = (KEPT_PER_TOKEN_S - below[1]) / (above[1] - below[1])
    return below[0] + part * (above[0] - below[0])


def draw(table: list[Row]) -> Figure:
    figure, (left, right) = axes(1, 2, size=(9, 3.4))
    for system in SYSTEMS:
        mine = [row for row in table if row.name == system.name]
        pools = [row for row in mine if row.shape.startswith("ShareGPT-like")]
        tokens = [float(row.shape.split(", ")[1].split()[0].replace(",", "")) for row in pools]
        rates = [value(row, "tok/s out") for row in pools]
        left.plot(
            tokens, rates, marker="o", markersize=3, color=COLORS[system.name], label=system.name
        )
        loads = [row for row in mine if row.shape.endswith(" requests/s")]
        right.plot(
            [float(row.shape.split()[0]) for row in loads],
            [value(row, "s a token") for row in loads],
            marker="o",
            markersize=3,
            color=COLORS[system.name],
        )
    left.set_xscale("log")
    left.minorticks_off()
    left.set_xticks(tokens, [f"{one:,.0f}" for one in tokens])
    left.set_xlabel("tokens that fit in the pool")
    left.set_ylabel("tokens out per second")
    left.set_ylim(bottom=0)
    right.set_xlabel("requests per second (20,000 tokens)")
    right.set_ylabel("seconds a token, mean")
    right.set_yscale("log")
    right.axhline(KEPT_PER_TOKEN_S, color="grey", linewidth=0.7, linestyle=":")
    left.legend(fontsize=7)
    return figure
