"""Running an engine to its end with its books checked, and the fake model's answers by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from fake_model import EOS_ID, FakeModel, hash_of, logits_of, make_engine

from pagedkv.engine import Engine
from pagedkv.records import OutputDelta, RequestOutput
from pagedkv.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24)


def fake_of(engine: Engine) -> FakeModel:
    fake = engine._runner._model
    assert isinstance(fake, FakeModel)
    return fake


def run(engine: Engine) -> tuple[dict[str, RequestOutput], list[OutputDelta]]:
    """Run to the end, with the invariants checked after every step."""
    outputs: dict[str, RequestOutput] = {}
    deltas: list[OutputDelta] = []
    while engine.has_work:
        result = engine.step()
        engine.check_invariants()
        deltas += result.deltas
        outputs |= {output.request_id: output for output in result.finished}
    statistics = engine.statistics()
    assert statistics.num_free + statistics.num_cached_idle == statistics.num_blocks
    assert engine._outputs.num_watched == 0
    return outputs, deltas


def answer(
    folder: Path, prompt: Any, params: SamplingParams, *, ascii_only: bool = True, **options: Any
) -> RequestOutput:
    engine = make_engine(folder, ascii_only=ascii_only, **options)
    engine.add_request("only", prompt, params)
    return run(engine)[0]["only"]


def greedy_by_hand(prompt: str, num_tokens: int) -> list[int]:
    """The answer from the fake's definition alone, without engine, blocks or scheduler."""
    context = list(prompt.encode())
    for _ in range(num_tokens):
        logits = logits_of(hash_of(np.array(context)), ascii_only=True)
        context.append(int(logits[:258].argmax()))
        if context[-1] == EOS_ID:
            break
    return context[len(prompt) :]
