"""Blocks that move between the pool and the CPU; on a GPU on streams of their own, beside the step
that asks for it, which waits only for what it touches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv.engine.stopwatch import Span, Stopwatch
from pagedkv.kv_cache import KVCache
from pagedkv.records import ScheduledStep, no_pairs


class Swaps:
    """What moves out was written by earlier steps, so it waits for these. Its blocks are free from
    then on: those that the step writes to move first, and the step waits for them alone; the others
    move once it is on its way, and later steps, which may write to any, wait for all.

    What comes in goes to blocks that no launched step touches (those given up beside one drain
    until it has ended), and comes from CPU blocks that earlier moves have filled. So it need only
    wait for these, and only the step that asks for it waits for it.
    """

    def __init__(self, cache: KVCache, watch: Stopwatch, stream: torch.cuda.Stream | None) -> None:
        """stream: where steps run; None: on a CPU, one after the other."""
        self._cache = cache
        self._watch = watch
        self._steps = stream
        self._inward: torch.cuda.Stream | None = None
        self._outward: torch.cuda.Stream | None = None
        self._last_out: torch.cuda.Event | None = None
        self._under_way: list[tuple[int, list[Span]]] = []  # bytes
        if stream is not None and cache.num_cpu_blocks:
            self._inward = torch.cuda.Stream(stream.device)  # type: ignore[no-untyped-call]
            self._outward = torch.cuda.Stream(stream.device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def around(
        self, step: ScheduledStep, written_blocks: Callable[[], NDArray[np.int64]]
    ) -> Iterator[None]:
        """Start what a step asks for; within it the step is launched, whether that fails or not.
        REQUIRES the steps' stream to be current.

        Args:
            written_blocks: blocks of the pool that the step's tokens are written to.
        """
        if self._last_out is not None and self._steps is not None:
            self._steps.wait_event(self._last_out)
        first, later = self._in_order(step, written_blocks)
        outward: list[Span] = []
        if self._outward is not None and self._steps is not None and step.swap_out.size:
            self._outward.wait_stream(self._steps)
        if first.size:
            outward.append(self._take_out(first))
            if self._last_out is not None and self._steps is not None:
                self._steps.wait_event(self._last_out)
        if step.swap_in.size:
            self._count(step.swap_in, [self._bring_in(step.swap_in)])
        try:
            yield
        finally:
            if later.size:
                outward.append(self._take_out(later))
            self._count(step.swap_out, outward)

    def ended(self) -> Iterator[tuple[int, float]]:
        """Bytes and seconds of what steps have moved out or in and has ended since the last call,
        each way of a step for itself.
        """
        under_way, self._under_way = self._under_way, []
        for num_bytes, spans in under_way:
            if all(span.has_ended() for span in spans):
                yield num_bytes, sum(span.seconds() for span in spans)
            else:
                self._under_way.append((num_bytes, spans))

    def _in_order(
        self, step: ScheduledStep, written_blocks: Callable[[], NDArray[np.int64]]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """What moves out before the step is launched, and what after."""
        if self._outward is None or not step.swap_out.size:
            return step.swap_out, no_pairs()
        if step.swap_in.size:  # may be what goes out in the same step
            return step.swap_out, no_pairs()
        return split(step.swap_out, np.concatenate([written_blocks(), step.copies[:, 1]]))

    def _count(self, pairs: NDArray[np.int64], spans: list[Span]) -> None:
        if spans:
            self._under_way.append((len(pairs) * self._cache.bytes_per_block, spans))

    def _take_out(self, pairs: NDArray[np.int64]) -> Span:
        with _on(self._outward):
            begin = self._watch.mark()
            self._cache.swap_out(torch.from_numpy(pairs))
            end = self._watch.mark()
        if isinstance(end, torch.cuda.Event):
            self._last_out = end
        return Span(begin, end)

    def _bring_in(self, pairs: NDArray[np.int64]) -> Span:
        with _on(self._inward):
            if self._inward is not None and self._last_out is not None:
                self._inward.wait_event(self._last_out)
            begin = self._watch.mark()
            self._cache.swap_in(torch.from_numpy(pairs))
            end = self._watch.mark()
        if isinstance(end, torch.cuda.Event) and self._steps is not None:
            self._steps.wait_event(end)
        return Span(begin, end)


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    """Work goes to the stream; None: on a CPU, to nowhere else."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def split(
    pairs: NDArray[np.int64], touched: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pairs (block, CPU block) whose blocks are touched, and the others. All of them are the first
    where two fill one CPU block, and their order counts.
    """
    is_touched = np.isin(pairs[:, 0], touched)
    if np.unique(pairs[:, 1]).size < len(pairs):
        is_touched[:] = True
    return pairs[is_touched], pairs[~is_touched]
