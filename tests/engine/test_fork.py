"""engine.fork: a running request goes on in several ways from where it is."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from fake_model import make_engine
from harness import answer, fake_of, run

from pagedkv.engine import Engine
from pagedkv.sampling_params import SamplingParams

PROMPT = "a prompt of thirty-two characters"[:32]
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=16, ignore_eos=True)
EXAMPLE = Path(__file__).parents[2] / "examples" / "explore_tree.py"


def started(folder: Path, num_steps: int, params: SamplingParams = SAMPLED, **opts: Any) -> Engine:
    engine = make_engine(folder, block_size=8, **opts)
    engine.add_request("a", PROMPT, params)
    for _ in range(num_steps):
        engine.step()
    return engine


def test_forks_keep_what_was_and_go_their_own_ways(tokenizer_folder: Path) -> None:
    alone = answer(tokenizer_folder, PROMPT, SAMPLED).outputs[0].token_ids
    engine = started(tokenizer_folder, 5)
    assert engine.fork("a", 3) == ["a-1", "a-2", "a-3"]
    outputs, _ = run(engine)
    ids = {name: output.outputs[0].token_ids for name, output in outputs.items()}
    assert ids["a"] == alone
    assert all(one[:5] == alone[:5] and len(one) == 16 for one in ids.values())
    assert len({tuple(one) for one in ids.values()}) == 4


def test_a_fork_draws_with_its_number_from_where_it_forked(tokenizer_folder: Path) -> None:
    """Fork k is answer k from the fork on: given the same past, the same draws."""
    group = SamplingParams(temperature=1.0, seed=5, max_tokens=16, ignore_eos=True, n=3)
    engine = started(tokenizer_folder, 1)
    first = engine.fork("a", 2)
    for name in first:
        assert engine.fork(name, 1)[0] not in first
    outputs, _ = run(engine)
    assert sorted(outputs) == ["a", "a-1", "a-2", "a-3", "a-4"]
    past = outputs["a"].outputs[0].token_ids[:1]
    prompt = [*PROMPT.encode(), *past]
    for k in (1, 2):
        expected = answer(tokenizer_folder, prompt, group).outputs[k].token_ids[:15]
        assert outputs[f"a-{k}"].outputs[0].token_ids == past + expected


@pytest.mark.parametrize("num_steps", [1, 4])
def test_a_fork_shares_blocks_and_copies_at_most_the_last(
    tokenizer_folder: Path, num_steps: int
) -> None:
    engine = started(tokenizer_folder, num_steps)
    before = engine.statistics().num_referenced
    tokens_before = fake_of(engine).num_tokens
    engine.fork("a", 3)
    assert engine.statistics().num_referenced == before  # nothing is taken by the fork itself
    engine.check_invariants()
    engine.step()
    assert fake_of(engine).num_tokens == tokens_before + 4  # and nothing computed again
    # With 32 tokens computed the last block is full, with 35 it is partial: all but the last copy.
    assert engine.statistics().num_copies == (0 if num_steps == 1 else 3)
    run(engine)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 2},
        {"num_gpu_blocks_override": 8, "watermark": 0.0},
        {"num_gpu_blocks_override": 9, "enable_prefix_caching": False},
    ],
)
def test_forks_without_a_slot_or_blocks_wait_and_answer_the_same(
    tokenizer_folder: Path, options: dict[str, Any]
) -> None:
    def answers(**opts: Any) -> dict[str, list[int]]:
        engine = started(tokenizer_folder, 6, max_model_len=64, **opts)
        engine.fork("a", 4)
        engine.fork("a-2", 2)
        return {name: one.outputs[0].token_ids for name, one in run(engine)[0].items()}

    assert answers(**options) == answers()


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_a_request_that_waits_or_is_in_its_prompt_can_be_forked(
    tokenizer_folder: Path, num_steps: int
) -> None:
    engine = started(tokenizer_folder, num_steps, max_num_seqs=4, max_num_batched_tokens=10)
    engine.fork("a", 2)
    outputs, _ = run(engine)
    expected = answer(
        tokenizer_folder,
        PROMPT,
        SamplingParams(temperature=1.0, seed=5, max_tokens=16, ignore_eos=True, n=3),
    )
    assert [outputs[name].outputs[0].token_ids for name in ("a", "a-1", "a-2")] == [
        one.token_ids for one in expected.outputs
    ]


def test_streams_of_forks_go_on_from_the_fork_and_stop_strings_see_the_whole_text(
    tokenizer_folder: Path,
) -> None:
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    greedy = answer(tokenizer_folder, PROMPT, params).outputs[0].text
    stop = greedy[3:7]  # begins before the fork and ends after it
    stopping = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, stop=stop)
    engine = started(tokenizer_folder, 5, stopping)
    engine.fork("a", 1, stream=True)
    outputs, deltas = run(engine)
    for name in ("a", "a-1"):
        assert outputs[name].outputs[0].text == greedy[:3]
        assert outputs[name].outputs[0].stop_reason == stop
    assert "".join(delta.text for delta in deltas) == ""
    engine = started(tokenizer_folder, 5, params)
    engine.fork("a", 1, stream=True)
    outputs, deltas = run(engine)
    assert "".join(delta.text for delta in deltas) == greedy[5:]


def test_aborting_parent_or_fork_leaves_the_other_alone(tokenizer_folder: Path) -> None:
    for gone, stays in (("a", "a-1"), ("a-1", "a")):
        engine = started(tokenizer_folder, 3)
        engine.fork("a")
        output = engine.abort(gone)
        assert output is not None
        assert len(output.outputs[0].token_ids) == 3
        outputs, _ = run(engine)
        assert outputs.keys() == {stays}
        assert len(outputs[stays].outputs[0].token_ids) == 16


def test_forks_that_cannot_be_are_refused_and_nothing_changes(tokenizer_folder: Path) -> None:
    engine = started(tokenizer_folder, 2)
    engine.add_request("group", PROMPT, SamplingParams(n=2))
    engine.add_request("a-2", PROMPT, SAMPLED)
    names = {*engine.cache_view().names.values()}
    for name, n, error, message in (
        ("unknown", 1, ValueError, "'unknown' is not running"),
        ("group", 1, ValueError, "'group' asks for several answers"),
        ("group-0", 1, ValueError, "'group-0' asks for several answers"),
        ("a", 0, ValueError, "n must be at least 1 and at most 128, got 0"),
        ("a", 129, ValueError, "n must be at least 1 and at most 128, got 129"),
        ("a", 1.5, TypeError, "n must be an integer"),
        ("a", 2, ValueError, "'a-2' is in use"),
    ):
        with pytest.raises(error, match=message):
            engine.fork(name, n)  # type: ignore[arg-type]
    assert {*engine.cache_view().names.values()} == names
    assert engine.fork("a") == ["a-1"]
    run(engine)


def test_forks_may_go_on_with_another_temperature_seed_and_length(tokenizer_folder: Path) -> None:
    engine = started(tokenizer_folder, 5, max_model_len=64)
    past = answer(tokenizer_folder, PROMPT, SAMPLED).outputs[0].token_ids[:5]
    greedy = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    assert engine.fork("a", 1, greedy) == ["a-1"]
    reseeded = SamplingParams(temperature=1.0, seed=6, max_tokens=40, ignore_eos=True)
    assert engine.fork("a", 2, reseeded) == ["a-2", "a-3"]
    cut = SamplingParams(temperature=1.0, max_tokens=None, ignore_eos=True)
    assert engine.fork("a-1", 1, cut) == ["a-4"]  # a fork of a fork, as long as the context
    ids = {name: one.outputs[0].token_ids for name, one in run(engine)[0].items()}
    assert ids["a"] == answer(tokenizer_folder, PROMPT, SAMPLED).outputs[0].token_ids
    assert all(one[:5] == past for one in ids.values())
    prompt = [*PROMPT.encode(), *past]
    rest = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    assert ids["a-1"][5:] == answer(tokenizer_folder, prompt, rest).outputs[0].token_ids
    # max_tokens 40 is cut to what a context of 64 leaves: 32, 5 of which were there.
    several = SamplingParams(n=4, temperature=1.0, seed=6, max_tokens=27, ignore_eos=True)
    drawn = answer(tokenizer_folder, prompt, several, max_model_len=64).outputs
    for k in (2, 3):
        assert ids[f"a-{k}"][5:] == drawn[k].token_ids
    assert len(ids["a-4"]) == 32
    assert engine.statistics().num_referenced == 0


def test_what_a_fork_cannot_have_is_refused_by_name_and_nothing_is_forked(
    tokenizer_folder: Path,
) -> None:
    engine = started(tokenizer_folder, 5, num_gpu_blocks_override=7)
    fine = {"temperature": 0.5, "max_tokens": 16, "ignore_eos": True}
    for options, message in (
        ({"n": 2}, "a fork of request 'a' is one answer: n, best_of and beam_width must be left"),
        ({"best_of": 2}, "is one answer"),
        ({"temperature": 0, "beam_width": 2}, "is one answer"),
        ({"ignore_eos": False}, "stop_token_ids and ignore_eos must be the same"),
        ({"stop_token_ids": [7]}, "stop_token_ids and ignore_eos must be the same"),
        ({"max_tokens": 5}, "has generated 5 tokens, .* max_tokens is 5, at least 6 is needed"),
        ({"max_tokens": 40}, "up to 40 generated ones need 9 blocks .* the pool has 7"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.fork("a", 1, SamplingParams(**(fine | options)))
    with pytest.raises(TypeError, match=r"must be a SamplingParams, got 0\.5"):
        engine.fork("a", 1, 0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'b' is not running"):
        engine.fork("b", 1, SamplingParams(**fine))
    assert {*engine.cache_view().names.values()} == {"a"}
    assert engine.fork("a", 1, SamplingParams(**(fine | {"max_tokens": 6}))) == ["a-1"]
    outputs, _ = run(engine)
    assert len(outputs["a-1"].outputs[0].token_ids) == 6


def test_a_stop_string_of_a_fork_is_looked_for_in_the_whole_text(tokenizer_folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    greedy = answer(tokenizer_folder, PROMPT, params).outputs[0].text
    engine = started(tokenizer_folder, 5, params)
    stop = greedy[4:8]
    stopping = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, stop=stop)
    engine.fork("a", 1, stopping)
    outputs, _ = run(engine)
    assert outputs["a"].outputs[0].text == greedy
    assert outputs["a-1"].outputs[0].text == greedy.split(stop)[0]
    assert outputs["a-1"].outputs[0].stop_reason == stop


def test_the_example_explores_a_tree(
    tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("explore_tree", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    engine = make_engine(tokenizer_folder, block_size=8)
    leaves = example.explore(engine, PROMPT, lambda text: text.count("e"))
    assert len(leaves) == 6
    assert leaves == sorted(leaves, reverse=True)
    assert all(30 <= len(text) <= 36 for _, text in leaves)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("level 1: 3 branches")
    assert shown[1].startswith("level 2: 6 branches")
    assert not engine.has_work
    engine.check_invariants()
