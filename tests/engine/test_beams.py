"""Beam search in the engine: equal to exhaustive search where the beams are wide enough, sharing
blocks, under every pressure; ends, aborts and refusals.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_model import EOS_ID, hash_of, make_engine
from harness import GREEDY, answer, fake_of, run

from pagedkv.engine import Engine
from pagedkv.sampling_params import SamplingParams

PROMPT = "a prompt that takes some blocks: "  # 33 tokens
ALLOWED = [ord("a"), ord("b"), ord("c"), EOS_ID]  # the toy vocabulary


def toy_logits(context: list[int]) -> np.ndarray:
    logits = np.full(260, -np.inf, dtype=np.float32)
    rng = np.random.default_rng(hash_of(np.array(context)))
    logits[ALLOWED] = rng.normal(size=len(ALLOWED)) * 2
    return logits


def toy_engine(folder: Path, **options: Any) -> Engine:
    engine = make_engine(folder, **options)
    fake = fake_of(engine)

    def compute_logits(hidden: torch.Tensor) -> torch.Tensor:
        rows = []
        for one in hidden[:, 0].tolist():
            logits = np.full(260, -np.inf, dtype=np.float32)
            logits[ALLOWED] = np.random.default_rng(int(one)).normal(size=len(ALLOWED)) * 2
            rows.append(torch.from_numpy(logits))
        return torch.stack(rows)

    fake.compute_logits = compute_logits  # type: ignore[method-assign]
    return engine


def exhaustive(prompt: str, max_tokens: int, length_penalty: float) -> list[list[int]]:
    """Every answer there is over the toy vocabulary, best first."""
    found: list[tuple[float, list[int]]] = []
    for length in range(1, max_tokens + 1):
        for tokens in itertools.product(ALLOWED, repeat=length):
            if EOS_ID in tokens[:-1] or (length < max_tokens and tokens[-1] != EOS_ID):
                continue
            context, total = list(prompt.encode()), 0.0
            for token in tokens:
                logits = torch.from_numpy(toy_logits(context))
                total += float(torch.log_softmax(logits, 0)[token])
                context.append(token)
            found.append((total / length**length_penalty, list(tokens)))
    return [tokens for _, tokens in sorted(found, reverse=True)]


def beams(width: int, **options: Any) -> SamplingParams:
    settings = {"temperature": 0, "max_tokens": 12, "n": width} | options
    return SamplingParams(beam_width=width, **settings)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_wide_beams_find_what_exhaustive_search_finds(
    tokenizer_folder: Path, length_penalty: float
) -> None:
    engine = toy_engine(tokenizer_folder, block_size=4)
    params = beams(27, n=10, max_tokens=4, length_penalty=length_penalty, early_stopping="never")
    engine.add_request("a", PROMPT, params)
    output = run(engine)[0]["a"]
    expected = exhaustive(PROMPT, 4, length_penalty)[:10]
    assert [one.token_ids for one in output.outputs] == expected
    assert [one.index for one in output.outputs] == list(range(10))


@pytest.mark.parametrize(
    "options",
    [
        {"num_gpu_blocks_override": 28},
        {"num_gpu_blocks_override": 28, "enable_prefix_caching": False, "watermark": 0.3},
        {"num_gpu_blocks_override": 24, "max_num_seqs": 5, "max_num_batched_tokens": 9},
        {"max_num_seqs": 4},
    ],
)
def test_beams_under_pressure_are_the_same_beams(
    tokenizer_folder: Path, options: dict[str, Any]
) -> None:
    def answers(params: SamplingParams, **opts: Any) -> list[Any]:
        engine = make_engine(tokenizer_folder, block_size=8, max_model_len=64, **opts)
        for name in ("a", "b", "c"):
            engine.add_request(name, PROMPT + name, params)
        outputs, _ = run(engine)
        return [[one.token_ids for one in outputs[name].outputs] for name in "abc"]

    params = beams(4)
    assert answers(params, **options) == answers(params)


@pytest.mark.parametrize("prompt_len", [32, 33])
def test_a_fork_of_a_beam_copies_at_most_its_last_block(
    tokenizer_folder: Path, prompt_len: int
) -> None:
    engine = make_engine(tokenizer_folder, block_size=8)
    engine.add_request("a", PROMPT[:prompt_len], beams(4, ignore_eos=True))
    num_steps = peak = 0
    while engine.has_work:
        copies_before = engine.statistics().num_copies
        engine.step()
        engine.check_invariants()
        num_steps += 1
        peak = max(peak, engine.statistics().num_referenced)
        assert engine.statistics().num_copies - copies_before <= 3
    assert num_steps == 12
    # The prompt was computed once, each later token of each beam once.
    assert fake_of(engine).num_tokens == prompt_len + 4 * 11
    own = -(-(prompt_len + 11) // 8) - prompt_len // 8
    assert peak <= prompt_len // 8 + 4 * own
    assert engine.statistics().num_referenced == 0


def test_beams_run_beside_other_requests_and_change_none(tokenizer_folder: Path) -> None:
    engine = make_engine(tokenizer_folder)
    sampled = SamplingParams(n=2, seed=3, max_tokens=9)
    engine.add_request("beams", PROMPT, beams(3))
    engine.add_request("greedy", PROMPT, GREEDY)
    engine.add_request("several", PROMPT, sampled)
    outputs, _ = run(engine)
    assert outputs["beams"].outputs == answer(tokenizer_folder, PROMPT, beams(3)).outputs
    assert outputs["greedy"].outputs == answer(tokenizer_folder, PROMPT, GREEDY).outputs
    assert outputs["several"].outputs == answer(tokenizer_folder, PROMPT, sampled).outputs


def test_the_best_beam_is_at_least_as_likely_as_the_greedy_answer(tokenizer_folder: Path) -> None:
    wins = 0
    for prompt in ("one", "two", "three", "four", "five"):
        params = SamplingParams(temperature=0, n=2, max_tokens=8, ignore_eos=True)
        greedy = answer(tokenizer_folder, prompt, params).outputs[0]
        best = answer(tokenizer_folder, prompt, beams(6, max_tokens=8, ignore_eos=True)).outputs[0]
        assert best.cumulative_logprob is not None
        assert greedy.cumulative_logprob is not None
        wins += best.cumulative_logprob > greedy.cumulative_logprob
    assert wins >= 3


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 6])
def test_abort_ends_all_beams_and_leaves_nothing(tokenizer_folder: Path, num_steps: int) -> None:
    engine = make_engine(tokenizer_folder, max_num_seqs=5, max_num_batched_tokens=20)
    engine.add_request("a", PROMPT, beams(4, n=2))
    for _ in range(num_steps):
        engine.step()
    output = engine.abort("a")
    assert output is not None
    assert [one.finish_reason for one in output.outputs] == ["abort"] * 2
    engine.check_invariants()
    assert not engine.has_work
    run(engine)
    assert engine.statistics().num_referenced == 0
    engine.add_request("a-3", PROMPT, GREEDY)
    run(engine)


def test_a_beam_that_fails_ends_its_search_alone(tokenizer_folder: Path) -> None:
    engine = make_engine(tokenizer_folder)
    fake_of(engine).is_bad = lambda context: len(context) == len(PROMPT) + 3
    engine.add_request("bad", PROMPT, beams(3))
    engine.add_request("good", "other", GREEDY)
    outputs, _ = run(engine)
    assert [one.finish_reason for one in outputs["bad"].outputs] == ["error"] * 3
    assert "NaN" in (outputs["bad"].error or "")
    assert outputs["good"].outputs == answer(tokenizer_folder, "other", GREEDY).outputs


def test_a_failing_step_ends_the_beams_in_it(tokenizer_folder: Path) -> None:
    engine = make_engine(tokenizer_folder)
    engine.add_request("a", PROMPT, beams(3, n=1))
    engine.step()
    engine.step()

    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("injected")

    fake_of(engine).before_step = fail
    result = engine.step()
    assert [one.error for one in result.finished] == ["the step failed: RuntimeError: injected"]
    engine.check_invariants()
    assert not engine.has_work


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_width": 1}, "beam_width must be at least 2 and at most 64, got 1"),
        ({"beam_width": 65}, "beam_width must be at least 2 and at most 64, got 65"),
        ({"beam_width": 3, "n": 4}, "n is 4, but a beam search has 3 beams"),
        ({"beam_width": 3, "best_of": 3}, "best_of has no meaning beside beam_width"),
        ({"beam_width": 3, "temperature": 0.5}, "temperature must be 0 in a beam search, got 0.5"),
        ({"beam_width": 3, "stop": "x"}, "use stop_token_ids instead of stop"),
        ({"beam_width": 3, "length_penalty": float("nan")}, "length_penalty must be finite"),
        ({"beam_width": 3, "early_stopping": "soon"}, "early_stopping must be True, False or"),
        ({"length_penalty": 2.0}, "need a beam_width"),
        ({"early_stopping": True}, "need a beam_width"),
    ],
)
def test_bad_beam_parameters_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**({"temperature": 0} | options))


def test_searches_that_can_never_run_or_stream_are_refused(tokenizer_folder: Path) -> None:
    engine = make_engine(tokenizer_folder, max_num_seqs=4, num_gpu_blocks_override=20, block_size=8)
    with pytest.raises(ValueError, match="searches with 5 beams at once, but max_num_seqs is 4"):
        engine.add_request("a", PROMPT, beams(5))
    with pytest.raises(ValueError, match=r"its 4 beams need up to 24 blocks .* the pool has 20"):
        engine.add_request("a", PROMPT, beams(4))
    with pytest.raises(ValueError, match="a beam search cannot stream"):
        engine.add_request("a", PROMPT, beams(3), stream=True)
    engine.add_request("a", PROMPT, beams(3))
    with pytest.raises(ValueError, match="asks for several answers"):
        engine.fork("a")
    assert len(run(engine)[0]["a"].outputs) == 3


def test_searches_of_different_widths_in_turns_find_what_they_find_alone(
    tokenizer_folder: Path,
) -> None:
    """Five beams on four slots: those of one search are computed in different steps, beside more or
    fewer of the wider one.
    """
    asked = {
        name: SamplingParams(temperature=0, max_tokens=max_tokens, beam_width=width, n=width)
        for name, width, max_tokens in (("wide", 3, 6), ("narrow", 2, 20))
    }
    engine = make_engine(tokenizer_folder, block_size=4, max_num_seqs=4)
    for name, params in asked.items():
        engine.add_request(name, f"the {name} one", params)
    outputs, _ = run(engine)
    for name, params in asked.items():
        alone = answer(tokenizer_folder, f"the {name} one", params)
        assert outputs[name].outputs == alone.outputs
