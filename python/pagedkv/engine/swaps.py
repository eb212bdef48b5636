"""Blocks that move between the pool and the CPU, in the order that a step asks for; on a GPU those
that come back move on a stream of their own, beside the step that runs.
"""

from __future__ import annotations

import torch

from pagedkv.engine.stopwatch import Span, Stopwatch
from pagedkv.kv_cache import KVCache
from pagedkv.records import ScheduledStep


class Swaps:
    """What moves out is overwritten by the step that asks for it, and was written by the one before
    it: so it moves between the two, on their stream.

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
        self._last_out: torch.cuda.Event | None = None
        if stream is not None and cache.num_cpu_blocks:
            self._inward = torch.cuda.Stream(stream.device)  # type: ignore[no-untyped-call]

    def run(self, step: ScheduledStep) -> tuple[int, Span] | None:
        """Bytes that moved, and when; None: none. REQUIRES the steps' stream to be current."""
        num_blocks = len(step.swap_out) + len(step.swap_in)
        if num_blocks == 0:
            return None
        begin = end = self._watch.mark()
        if step.swap_out.size:
            self._cache.swap_out(torch.from_numpy(step.swap_out))
            end = self._watch.mark()
            if isinstance(end, torch.cuda.Event):
                self._last_out = end
        if step.swap_in.size:
            came_in = self._bring_in(torch.from_numpy(step.swap_in))
            begin, end = came_in.begin if not step.swap_out.size else begin, came_in.end
        return num_blocks * self._cache.bytes_per_block, Span(begin, end)

    def _bring_in(self, pairs: torch.Tensor) -> Span:
        if self._inward is None or self._steps is None:
            begin = self._watch.mark()
            self._cache.swap_in(pairs)
            return Span(begin, self._watch.mark())
        with torch.cuda.stream(self._inward):
            if self._last_out is not None:
                self._inward.wait_event(self._last_out)
            begin = self._watch.mark()
            self._cache.swap_in(pairs)
            end = self._watch.mark()
        assert isinstance(end, torch.cuda.Event)
        self._steps.wait_event(end)
        return Span(begin, end)
