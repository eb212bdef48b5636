"""A request preempted after any of its tokens gives the whole output it gives alone: text, ids,
log-probabilities, finish reason and usage.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from fake_model import make_engine
from harness import answer, run

from pagedkv.records import RequestOutput
from pagedkv.sampling_params import SamplingParams

PROMPT = "preempt me, please"
KINDS = {
    "greedy": SamplingParams(temperature=0, max_tokens=14, ignore_eos=True),
    "sampled": SamplingParams(temperature=1.0, seed=9, max_tokens=14, ignore_eos=True),
    "stop string": SamplingParams(seed=9, max_tokens=14, stop="zzz", ignore_eos=True),
    "three answers": SamplingParams(n=3, seed=9, max_tokens=14, ignore_eos=True),
    "best of three": SamplingParams(n=1, best_of=3, seed=9, max_tokens=14, ignore_eos=True),
    "beams": SamplingParams(temperature=0, n=3, beam_width=3, max_tokens=14, ignore_eos=True),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_after_any_token_the_output_is_the_same(
    tokenizer_folder: Path, kind: str, mode: str
) -> None:
    params = KINDS[kind]
    alone = answer(tokenizer_folder, PROMPT, params, block_size=4)
    num_preempted = 0
    for num_steps in range(1, 14):
        engine = make_engine(
            tokenizer_folder,
            block_size=4,
            max_num_seqs=4,
            num_gpu_blocks_override=40,
            swap_space=0.001,
            preemption_mode=mode,
            scheduling_policy="priority",
            watermark=0.0,
        )
        engine.add_request("victim", PROMPT, params, priority=1)
        for _ in range(num_steps):
            engine.step()
        # It needs nearly the whole pool, and so displaces all that the victim has running.
        engine.add_request("urgent", "u" * 150, SamplingParams(temperature=0, max_tokens=2))
        outputs, _ = run(engine)
        victim = outputs["victim"]
        assert victim.num_preemptions >= 1
        num_preempted += victim.num_preemptions
        assert without_history(victim) == without_history(alone)
        for one, right in zip(victim.outputs, alone.outputs, strict=True):
            assert one.cumulative_logprob == pytest.approx(right.cumulative_logprob, abs=1e-12)
    assert num_preempted >= 13


def without_history(output: RequestOutput) -> RequestOutput:
    """What must not depend on where it was preempted, and log-probabilities aside."""
    outputs = [dataclasses.replace(one, cumulative_logprob=None) for one in output.outputs]
    return dataclasses.replace(
        output, request_id="", num_preemptions=0, num_cached_tokens=0, outputs=outputs
    )
