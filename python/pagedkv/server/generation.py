"""Generation: the engine's work for one HTTP request, from the queue to its end: the last answer,
the time, or the client's leaving, whichever comes first.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np
from starlette.types import Receive

from pagedkv.engine import Stream
from pagedkv.records import OutputDelta, RequestOutput
from pagedkv.server.conversations import Origin
from pagedkv.server.errors import Refusal
from pagedkv.server.event_stream import left
from pagedkv.server.service import Service


class ClientGone(Exception):
    """Nobody is there to be answered."""


class Generation:
    """What comes of the requests of one stream. Whoever has one calls end()."""

    def __init__(
        self,
        service: Service,
        stream: Stream,
        num_places: int,
        deadline_s: float,
        response_id: str,
        origin: Origin,
        *,
        only_new: bool = False,
    ) -> None:
        """only_new: outputs of forks, without what there was before them; they must stream."""
        self._service = service
        self._response_id = response_id
        self._outputs: list[RequestOutput] = []
        self._only_new = only_new
        self._deltas: dict[str, list[OutputDelta]] = {name: [] for name in stream.request_ids}
        service.conversations.begin(response_id, origin, stream.request_ids)
        self._stream = stream
        self._num_places = num_places
        self._deadline_s = deadline_s
        self._timer = asyncio.get_running_loop().call_at(deadline_s, self._time_is_up)

    def _time_is_up(self) -> None:
        message = (
            f"the answer was not complete after {self._service.limits.request_timeout_s:g} seconds"
        )
        self._stream.fail(Refusal(504, message, code="timeout"))

    @property
    def request_ids(self) -> tuple[str, ...]:
        return self._stream.request_ids

    @property
    def left_s(self) -> float:
        return max(self._deadline_s - asyncio.get_running_loop().time(), 0.0)

    def end(self) -> None:
        """What has not ended ends now, and its blocks are free. Safe to call twice."""
        self._timer.cancel()
        self._service.conversations.end(self._response_id, None)
        self._service.engine.abort(self._stream.request_ids)
        self._service.room.give_back(self._num_places)
        self._num_places = 0

    async def items(self) -> AsyncIterator[OutputDelta | RequestOutput]:
        """Deltas and outputs as they come.

        Raises Refusal (504): the time is up. EngineDead: nothing more will come.
        """
        while not self._stream.is_done:
            for item in await self._stream.take():
                if isinstance(item, OutputDelta):
                    if self._only_new:
                        self._deltas[item.request_id].append(item)
                else:
                    if self._only_new:
                        item = _additions(item, self._deltas[item.request_id])
                    self._outputs.append(item)
                    self._keep()
                yield item

    def _keep(self) -> None:
        """It can be forked before its client hears of the end."""
        if len(self._outputs) == len(self.request_ids):
            output = self._outputs[0] if len(self._outputs) == 1 else None
            self._service.conversations.end(self._response_id, output)

    async def outputs(self, receive: Receive) -> list[RequestOutput]:
        """All outputs, in the order of request_ids; none is left behind.

        Raises Refusal: one of them has failed, or the time is up; ClientGone; EngineDead.
        """
        collecting = asyncio.ensure_future(self._collect())
        leaving = asyncio.ensure_future(left(receive))
        try:
            await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                raise ClientGone
            return collecting.result()
        finally:
            self.end()
            for task in (collecting, leaving):
                task.cancel()
            await asyncio.gather(collecting, leaving, return_exceptions=True)

    async def _collect(self) -> list[RequestOutput]:
        found = {}
        async for item in self.items():
            if isinstance(item, RequestOutput):
                check(item)
                found[item.request_id] = item
        return [found[name] for name in self.request_ids]


def _additions(output: RequestOutput, deltas: list[OutputDelta]) -> RequestOutput:
    """A fork's output with what its deltas have told; the rest counts as its prompt."""
    (answer,) = output.outputs
    text = "".join(delta.text for delta in deltas)
    new_ids = [token_id for delta in deltas for token_id in delta.token_ids]
    old_ids = answer.token_ids[: len(answer.token_ids) - len(new_ids)]
    return dataclasses.replace(
        output,
        prompt_ids=np.append(output.prompt_ids, np.array(old_ids, dtype=np.int32)),
        outputs=[dataclasses.replace(answer, text=text, token_ids=new_ids)],
    )


def check(output: RequestOutput) -> None:
    """Raise Refusal (500) if a request has failed."""
    if output.error is not None:
        raise Refusal(500, output.error)


async def begin(
    service: Service,
    num_prompts: int,
    submit: Callable[[], Awaitable[Stream]],
    response_id: str,
    origin: Origin,
    *,
    only_new: bool = False,
) -> Generation:
    """Take a place in the queue, then prepare and submit; nothing is left taken if that fails."""
    deadline_s = asyncio.get_running_loop().time() + service.limits.request_timeout_s
    service.room.take(num_prompts)
    try:
        stream = await submit()
    except BaseException:
        service.room.give_back(num_prompts)
        raise
    return Generation(
        service, stream, num_prompts, deadline_s, response_id, origin, only_new=only_new
    )
