"""Which steps are graphs, and of which size: a graph of decodes takes the logits of each of its
rows, one of a step with prompts those of each row's last token; neither has two samples of a row.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_model import make_engine
from harness import run

from pagedkv.engine.input_builder import PaddedSize
from pagedkv.engine.step_graphs import GraphSizes, decode_size
from pagedkv.records import ScheduledStep, empty_step
from pagedkv.sampling_params import SamplingParams


def step_of(query_lens: list[int], sample_rows: list[int]) -> ScheduledStep:
    return dataclasses.replace(
        empty_step(),
        num_tokens=sum(query_lens),
        slots=np.arange(len(query_lens)),
        query_lens=np.array(query_lens),
        sample_rows=np.array(sample_rows),
    )


@pytest.mark.parametrize(
    ("query_lens", "sample_rows", "size"),
    [
        ([1], [0], decode_size(1)),
        ([1] * 5, [0, 1, 2, 3, 4], decode_size(8)),
        ([1] * 12, list(range(12)), decode_size(12)),
        # A prompt's first token, which is not its last.
        ([1, 1], [0], PaddedSize(16, 4, 16)),
        ([9], [0], PaddedSize(16, 2, 16)),
        ([9], [], PaddedSize(16, 2, 16)),
        ([1, 1, 15], [0, 1], PaddedSize(32, 4, 32)),
        ([1] * 7 + [25], list(range(8)), PaddedSize(32, 12, 32)),
        ([1] * 11 + [2], list(range(12)), None),  # no row is left to take the padding
        ([1, 100], [0, 1], None),  # more tokens than graphs have
        # The second prompt has two answers.
        ([1, 4], [0, 1, 1], None),
        # As many samples as rows, and as tokens, but not one of each.
        ([1, 1], [1, 1], None),
        ([1, 1, 1], [0, 0, 2], None),
    ],
)
def test_the_size_of_a_step(
    query_lens: list[int], sample_rows: list[int], size: PaddedSize | None
) -> None:
    assert GraphSizes(12, 64).of(step_of(query_lens, sample_rows)) == size


def test_without_graphs_of_prompts_decodes_are_graphs() -> None:
    sizes = GraphSizes(4, 0)
    assert sizes.of(step_of([1, 1, 1], [0, 1, 2])) == decode_size(4)
    assert sizes.of(step_of([1, 2], [0, 1])) is None


def test_answers_of_a_prompt_beside_the_first_token_of_another_are_no_step_of_decodes(
    tokenizer_folder: Path,
) -> None:
    engine = make_engine(
        tokenizer_folder, max_num_seqs=3, max_num_batched_tokens=3, enable_prefix_caching=False
    )
    sizes = GraphSizes(3, 0)
    seen: list[tuple[Any, PaddedSize | None]] = []
    build = engine._runner._inputs.build

    def built(step: ScheduledStep, *rest: Any, **options: Any) -> Any:
        seen.append(((step.query_lens.tolist(), step.sample_rows.tolist()), sizes.of(step)))
        return build(step, *rest, **options)

    engine._runner._inputs.build = built  # type: ignore[method-assign]
    engine.add_request("decode", "d", SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    engine.add_request("answers", "abc", SamplingParams(temperature=0, n=2, max_tokens=2))
    engine.add_request("other", "xyz", SamplingParams(temperature=0, max_tokens=2))
    run(engine)
    assert (([1, 1, 1], [0, 1, 1]), None) in seen
    assert all(
        size is None or rows == list(range(len(lens))) for (lens, rows), size in seen
    )  # only steps of one sample a row
