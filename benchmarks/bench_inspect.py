"""What the live view costs: the engine and its server while somebody watches, and the browser.

100,000 blocks, 1,024 sequences that decode and as many that wait; a step every 40 ms, without a
model. Counted is CPU time: on the engine's thread that of the looks and of what each step tells the
view, on the server's that of the whole event loop, which does nothing else here. Threshold: 1 % of
a core, and nothing at all with nobody watching. In the browser (headless Chromium, drawing on the
CPU) it is the CPU time of the page's thread from a frame that comes to its picture, less what an
idle one takes to be asked; threshold 16.7 ms in 95 of 100, as a screen has it. The rows of the
browser are left out where there is none.
"""

from __future__ import annotations

import asyncio
import queue
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import rows
from pagedkv.block_manager import BlockManager
from pagedkv.config import SchedulerConfig
from pagedkv.inspect.live import LiveView
from pagedkv.inspect.page import recorded_page
from pagedkv.inspect.recorded import recorded_lines
from pagedkv.records import RunFacts
from pagedkv.request import Request
from pagedkv.scheduler import RunView, Scheduler

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "inspect"))

from chromium import Page, browsing, chromium

NUM_BLOCKS, BLOCK_SIZE, NUM_SEQS = 100_000, 16, 1024
SHAPE = f"{NUM_BLOCKS} blocks, {NUM_SEQS} sequences"
STEP_S = 0.04
WATCH_S = 15.0
NUM_PAGE_STEPS = 140
NUM_WARM_UP = 20  # frames in which the browser still compiles the page's script
MAX_PERCENT = 1.0
FRAME_MS = 1000 / 60


class Run:
    """Steady decode."""

    def __init__(self) -> None:
        self._source = np.random.default_rng(0)
        self.manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE, shuffle_seed=0)
        config = SchedulerConfig(max_num_seqs=NUM_SEQS, max_num_batched_tokens=2_000_000)
        self.scheduler = Scheduler(self.manager, config, max_model_len=4096)
        self.views: list[RunView] = []
        for i in range(2 * NUM_SEQS):
            length = 600 + int(self._source.integers(64))
            prompt = self._source.integers(0, 30_000, length, dtype=np.int32)
            self.scheduler.add(Request(f"cmpl-{i:032x}", prompt, 3000))
        self.step()

    def step(self) -> None:
        step = self.scheduler.schedule()
        assert step is not None
        assert step.slots.size == NUM_SEQS
        token_ids = self._source.integers(0, 30_000, step.sample_rows.size)
        ended = self.scheduler.update(step, token_ids)
        for view in self.views:
            view.landed(step, ended, 0.0, STEP_S)

    def open_view(self) -> RunView:
        self.views.append(RunView(self.manager, self.scheduler))
        return self.views[-1]

    def close_view(self, view: RunView) -> None:
        self.views.remove(view)


class Engine:
    """A run on a thread of its own that obeys commands between steps; looks_s: their CPU time."""

    max_num_seqs, tokenizer = NUM_SEQS, None

    def __init__(self, run: Run) -> None:
        self._run = run
        self._commands: queue.SimpleQueue[tuple[Callable[[Any], Any], Any] | None]
        self._commands = queue.SimpleQueue()
        self.looks_s, self.num_calls = 0.0, 0
        self._thread = threading.Thread(target=self._steps)
        self._thread.start()

    def call(self, function: Callable[[Any], Any]) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        self._commands.put((function, future))
        return future

    def stop(self) -> None:
        self._commands.put(None)
        self._thread.join()

    def _steps(self) -> None:
        due_s = time.monotonic()
        while True:
            try:
                command = self._commands.get(timeout=max(0.0, due_s - time.monotonic()))
            except queue.Empty:
                self._run.step()
                due_s = max(due_s + STEP_S, time.monotonic())
                continue
            if command is None:
                return
            began_s = time.thread_time()
            value = command[0](self._run)
            self.looks_s += time.thread_time() - began_s
            self.num_calls += 1
            future = command[1]
            future.get_loop().call_soon_threadsafe(future.set_result, value)


async def watch(run: Run, *, is_open: bool) -> tuple[float, float, int, int, int]:
    """(CPU seconds of looks, of the loop, frames, bytes, calls) in WATCH_S."""
    engine = Engine(run)
    view = LiveView(engine, "bench", asyncio.Event(), shows_text=False)
    num_frames = num_bytes = 0

    async def read() -> None:
        nonlocal num_frames, num_bytes
        async for line in viewer.lines():
            num_frames += 1
            num_bytes += len(line)

    if is_open:
        viewer = view.join()
        reading = asyncio.ensure_future(read())
        while num_frames < 2:  # the whole of it first
            await asyncio.sleep(0.1)
    looks_s, num_calls, num_before, bytes_before = (
        engine.looks_s, engine.num_calls, num_frames, num_bytes,
    )  # fmt: skip
    began_s = time.thread_time()
    await asyncio.sleep(WATCH_S)
    loop_s = time.thread_time() - began_s
    taken = (engine.looks_s - looks_s, loop_s, num_frames - num_before, num_bytes - bytes_before)
    num_calls = engine.num_calls - num_calls
    if is_open:
        view.leave(viewer)
        viewer.end()
        await reading
        while run.views:
            await asyncio.sleep(0.05)
    engine.stop()
    return *taken, num_calls


def costs(run: Run) -> list[rows.Row]:
    made = []
    for is_open in (True, False):
        looks_s, loop_s, num_frames, num_bytes, num_calls = asyncio.run(watch(run, is_open=is_open))
        percent = 100 * (looks_s + loop_s) / WATCH_S
        rate = f"{percent:.2f} % of a core: {100 * looks_s / WATCH_S:.2f} of the engine's thread"
        if is_open:
            rate += f"; {num_frames / WATCH_S:.1f} frames/s, {num_bytes / WATCH_S / 1e3:.0f} kB/s"
            limit, holds = f"< {MAX_PERCENT:.0f} %", percent < MAX_PERCENT
            us = 1e6 * (looks_s + loop_s) / max(num_frames, 1)
        else:
            limit, holds, us = "no call", num_calls == 0, 0.0
        made.append(
            rows.Row("open" if is_open else "closed", SHAPE, us, rate, limit=limit, holds=holds)
        )
    return made


def cpu_s(page: Page) -> float:
    """CPU time of the page's thread so far."""
    metrics = page.call("Performance.getMetrics")["metrics"]
    return next(float(one["value"]) for one in metrics if one["name"] == "TaskDuration")


def frame_ms(page: Page, action: str) -> float:
    """CPU time of the page's thread for what an action changes, and for asking."""
    began_s = cpu_s(page)
    page.evaluate(
        f"({action}, new Promise((done) => requestAnimationFrame(() => setTimeout(done))))"
    )
    return 1e3 * (cpu_s(page) - began_s)


def drawing(run: Run) -> list[rows.Row]:
    """Steps of a recorded run, one after the other."""
    if chromium() is None:
        print("no Chromium here: its rows are left out")
        return []
    view = run.open_view()
    looks = []
    for _ in range(NUM_PAGE_STEPS):
        run.step()
        looks.append(view.take())
    facts = RunFacts("bench", "float32", 1, 1, 1, 8, 4096, NUM_BLOCKS, 0)
    lines = recorded_lines(facts, block_size=BLOCK_SIZE, max_num_seqs=NUM_SEQS, looks=looks)
    made = []
    with tempfile.TemporaryDirectory() as folder, browsing(Path(folder) / "profile") as page:
        path = Path(folder) / "run.html"
        path.write_text(recorded_page(lines).html)
        page.open(path.as_uri())
        page.wait("pagedkv.seek && !pagedkv.page.isDirty")
        page.call("Performance.enable", timeDomain="threadTicks")
        idle = statistics.median(frame_ms(page, "null") for _ in range(NUM_WARM_UP))
        times = []
        for place in range(1, NUM_PAGE_STEPS):
            took = frame_ms(page, f"pagedkv.seek({place})")
            assert not page.evaluate("pagedkv.page.isDirty")
            if place > NUM_WARM_UP:
                times.append(took - idle)
    times.sort()
    median, late = statistics.median(times), times[int(0.95 * len(times))]
    rate = f"95th percentile {late:.1f} ms, longest {times[-1]:.1f} ms"
    limit = f"95th percentile <= {FRAME_MS:.1f} ms"
    made.append(rows.Row("page", SHAPE, 1e3 * median, rate, limit=limit, holds=late <= FRAME_MS))
    return made


def main() -> int:
    options = rows.parser(__doc__.splitlines()[0]).parse_args()
    return rows.report("inspect", [*costs(Run()), *drawing(Run())], save=options.save)


if __name__ == "__main__":
    sys.exit(main())
