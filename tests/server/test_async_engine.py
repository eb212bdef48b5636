"""The engine on its own thread: commands in order, results on the loop, nothing left behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_model import make_engine
from harness import fake_of

from pagedkv.engine import AsyncEngine, Engine, EngineDead, Stream, Submission
from pagedkv.engine.stream import joined
from pagedkv.records import OutputDelta, RequestOutput
from pagedkv.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
WAIT_S = 30.0

Body = Callable[[AsyncEngine, Engine], Awaitable[None]]


@pytest.fixture
def run(tokenizer_folder: Path) -> Callable[[Body], None]:
    """run(body): body(async_engine, engine) on a loop; then the thread ends and nothing is held."""

    def call(body: Body) -> None:
        async def whole() -> None:
            engine = make_engine(tokenizer_folder)
            one = AsyncEngine(engine)
            one.start()
            try:
                await asyncio.wait_for(body(one, engine), WAIT_S)
            finally:
                fake_of(engine).before_step = lambda input_ids: None
                await one.stop()
            assert not one._thread.is_alive()
            engine.check_invariants()
            statistics = engine.statistics()
            assert statistics.num_free + statistics.num_cached_idle == statistics.num_blocks
            assert engine._outputs.num_watched == 0
            assert one.num_unfinished == 0

        asyncio.run(whole())

    return call


async def everything(stream: Stream) -> list[Any]:
    items: list[Any] = []
    while not stream.is_done:
        items += await stream.take()
    return items


def test_deltas_joined_are_the_output(run: Any) -> None:
    async def body(one: AsyncEngine, engine: Engine) -> None:
        stream = await one.submit([Submission("a", list(b"Hello"), PARAMS)], stream=True)
        *deltas, output = await everything(stream)
        assert isinstance(output, RequestOutput)
        assert "".join(delta.text for delta in deltas) == output.outputs[0].text
        assert [delta.finish_reason for delta in deltas][-1] == "length"

    run(body)


def test_of_several_requests_one_that_is_refused_leaves_none_queued(run: Any) -> None:
    async def body(one: AsyncEngine, engine: Engine) -> None:
        good = Submission("a", list(b"Hello"), PARAMS)
        for bad in (Submission("b", [10**6], PARAMS), good):  # outside the vocabulary; a used id
            with pytest.raises(ValueError, match=r"vocabulary|in use"):
                await one.submit([good, bad], stream=False)
            assert not await one.call(lambda e: e.has_work)
        await everything(await one.submit([good], stream=False))  # its name is free

    run(body)


def test_an_abort_right_behind_a_submission_is_obeyed_after_it(run: Any) -> None:
    async def body(one: AsyncEngine, engine: Engine) -> None:
        holding = hold(engine)
        first = await one.submit([Submission("a", list(b"Hello"), PARAMS)], stream=False)
        task = asyncio.ensure_future(
            one.submit([Submission("b", list(b"World"), PARAMS)], stream=True)
        )
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        holding.set()
        await everything(first)
        assert not await one.call(lambda e: "b" in e._scheduler)

    run(body)


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("max_tokens", [1, 20])
def test_an_id_is_free_behind_its_abort_and_nothing_of_the_old_request_comes_to_the_new_one(
    run: Any, streams: bool, max_tokens: int
) -> None:
    async def body(one: AsyncEngine, engine: Engine) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        alone = await one.submit([Submission("c", list(b"World"), PARAMS)], stream=False)
        (expected,) = await everything(alone)
        for _ in range(3):
            holding = hold(engine)
            await one.submit([Submission("a", list(b"Hello"), params)], stream=streams)
            while engine.num_running == 0:  # its step is held
                await asyncio.sleep(0.001)
            one.abort(["a"])
            task = asyncio.ensure_future(
                one.submit([Submission("a", list(b"World"), PARAMS)], stream=streams)
            )
            await asyncio.sleep(0)
            holding.set()
            *deltas, output = await everything(await task)
            assert output.outputs == expected.outputs
            assert output.prompt_token_ids == list(b"World")
            assert [token for delta in deltas for token in delta.token_ids] == (
                expected.outputs[0].token_ids if streams else []
            )
        assert not one._leaving

    run(body)


def hold(engine: Engine) -> threading.Event:
    """Let the next step wait for the event."""
    event = threading.Event()

    def wait(input_ids: Any) -> None:
        assert event.wait(WAIT_S)

    fake_of(engine).before_step = wait
    return event


def test_all_that_runs_can_be_ended_with_what_it_has(run: Any) -> None:
    async def body(one: AsyncEngine, engine: Engine) -> None:
        group = SamplingParams(max_tokens=200, n=2, ignore_eos=True)
        stream = await one.submit(
            [Submission("a", list(b"Hello"), group), Submission("b", list(b"World"), PARAMS)],
            stream=True,
        )
        await stream.take()
        one.abort_all()
        outputs = [item for item in await everything(stream) if isinstance(item, RequestOutput)]
        assert {output.request_id for output in outputs} == {"a", "b"}
        reasons = {answer.finish_reason for one in outputs for answer in one.outputs}
        assert "abort" in reasons

    run(body)


def test_stop_ends_what_runs(tokenizer_folder: Path) -> None:
    async def whole() -> None:
        one = AsyncEngine(make_engine(tokenizer_folder))
        one.start()
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        stream = await one.submit([Submission("a", list(b"Hello"), params)], stream=False)
        await one.stop()
        (output,) = await everything(stream)
        assert output.outputs[0].finish_reason in ("abort", "length")
        with pytest.raises(EngineDead, match="shutting down"):
            await one.call(lambda engine: None)

    asyncio.run(asyncio.wait_for(whole(), WAIT_S))


def test_an_engine_that_fails_tells_everybody_and_is_not_healthy(run: Any) -> None:
    async def body(one: AsyncEngine, engine: Engine) -> None:
        holding = hold(engine)
        stream = await one.submit([Submission("a", list(b"Hello"), PARAMS)], stream=True)

        def broken() -> Any:
            raise LookupError("a bug of the scheduler's")

        await asyncio.sleep(0)
        # Behind the held step; in the queue before it is let go.
        calls = [asyncio.ensure_future(one.call(lambda e: setattr(e, "step", broken)))]
        await asyncio.sleep(0)
        holding.set()
        await asyncio.gather(*calls)
        with pytest.raises(EngineDead, match="LookupError"):
            await everything(stream)
        assert one.failure is not None
        with pytest.raises(EngineDead):
            await one.submit([Submission("b", list(b"Hello"), PARAMS)], stream=True)
        del engine.step  # type: ignore[method-assign]
        engine.abort("a")

    run(body)


def test_a_step_that_does_not_end_is_seen(run: Any) -> None:
    async def body(one: AsyncEngine, engine: Engine) -> None:
        assert one.stalled_s == 0
        now = [100.0]
        one._clock = lambda: now[0]
        holding = hold(engine)
        reached = threading.Event()
        wait = fake_of(engine).before_step

        def step(input_ids: Any) -> None:
            reached.set()
            wait(input_ids)

        fake_of(engine).before_step = step
        stream = await one.submit([Submission("a", list(b"Hello"), PARAMS)], stream=False)
        await asyncio.to_thread(reached.wait, WAIT_S)
        now[0] += 50
        assert one.stalled_s == 50
        holding.set()
        await everything(stream)

    run(body)


def test_errors_of_a_command_reach_its_caller_alone(run: Any) -> None:
    async def body(one: AsyncEngine, engine: Engine) -> None:
        with pytest.raises(KeyError, match="is not known"):
            await one.call(lambda e: e.explain("nobody"))
        assert await one.call(lambda e: e.num_running) == 0

    run(body)


def test_a_reader_that_is_cancelled_as_an_item_comes_is_cancelled() -> None:
    async def body() -> None:
        stream = Stream(["a"])
        reading = asyncio.ensure_future(stream.take())
        await asyncio.sleep(0)
        stream.put(OutputDelta("a", "x", [1]))
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    asyncio.run(body())


def test_what_came_before_a_failure_is_told_before_it() -> None:
    async def body() -> None:
        stream = Stream(["a"])
        stream.put(OutputDelta("a", "x", [1]))
        stream.fail(EngineDead("it is over"))
        assert len(await stream.take()) == 1
        for _ in range(2):
            with pytest.raises(EngineDead, match="it is over"):
                await stream.take()

    asyncio.run(asyncio.wait_for(body(), WAIT_S))


def test_a_slow_reader_gets_the_pieces_of_an_answer_as_one() -> None:
    def delta(text: str, index: int, **last: Any) -> OutputDelta:
        return OutputDelta("a", text, [len(text)], index, **last)

    output = RequestOutput("a", None, np.array([1], dtype=np.int32), [], 0, 0)
    items = [delta("x", 0), delta("y", 1), delta("zz", 0, finish_reason="stop"), output]
    assert joined([*items]) == [
        OutputDelta("a", "xzz", [1, 2], 0, None, "stop"),
        OutputDelta("a", "y", [1], 1),
        output,
    ]
