"""A run: requests sent at their times, whatever has become of those before them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import httpx

from pagedkv.cli.load.client import Outcome, Target, send
from pagedkv.cli.load.prompts import LoadPrompt

_MODELS_TIMEOUT_S = 30.0


def new_client(timeout_s: float) -> httpx.AsyncClient:
    """With as many connections as there are requests at once."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(limits=limits, timeout=timeout_s)


async def first_model(client: httpx.AsyncClient, target: Target) -> str:
    """What the server calls the first of its models.

    Raises:
        RuntimeError: it does not say.
    """
    url = target.url("/v1/models")
    try:
        response = await client.get(url, headers=target.headers, timeout=_MODELS_TIMEOUT_S)
        response.raise_for_status()
        name = response.json()["data"][0]["id"]
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise RuntimeError(f"{url} does not tell a model ({error}): give --model") from None
    return str(name)


async def run_load(
    client: httpx.AsyncClient,
    target: Target,
    prompts: Sequence[LoadPrompt],
    arrivals_s: Sequence[float],
    *,
    max_concurrency: int | None = None,
    timeout_s: float = 600.0,
    on_end: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Send each prompt at its arrival, and tell what came of it, in their order.

    A slow answer delays no arrival. Where max_concurrency holds a request back, or this program is
    late, that is part of what its user waits: latencies count from the scheduled arrival too.

    Args:
        arrivals_s: from now, ascending.
        max_concurrency: requests at once; None: all that have arrived.
        timeout_s: for one request, from when it is sent.
    """
    loop = asyncio.get_running_loop()
    places = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)

    async def one(prompt: LoadPrompt, scheduled_s: float) -> Outcome:
        if places is not None:
            await places.acquire()
        try:
            outcome = await send(
                client, target, prompt, scheduled_s=scheduled_s, timeout_s=timeout_s
            )
        finally:
            if places is not None:
                places.release()
        on_end(outcome)
        return outcome

    begin_s, running = loop.time(), []
    try:
        for prompt, arrival_s in zip(prompts, arrivals_s, strict=True):
            left_s = begin_s + arrival_s - loop.time()
            if left_s > 0:
                await asyncio.sleep(left_s)
            running.append(asyncio.ensure_future(one(prompt, begin_s + arrival_s)))
        return await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
