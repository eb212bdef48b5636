"""Tokens per second of pagedkv and of transformers' `generate`, side by side in one run on the CPU.

Both sides hold the same SmolLM2 weights, dequantised from the same file, and decode greedily with
the end-of-sequence token ignored,
so each request gives exactly the number of tokens asked for. transformers batches statically: a
batch runs until its longest request
ends, and only the tokens asked for are counted on either side. Rounds alternate between the two;
the median of each side counts.

FLOPs of a step: 2 * 134.5 M parameters * tokens. Bytes of a decode step: all weights once, 269 MB
in bf16.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import rows
from pagedkv import LLM, SamplingParams
from pagedkv.weights import open_checkpoint

PROMPT_LEN = 128


@dataclass(frozen=True, slots=True)
class Mix:
    """Requests of one measurement: a prompt of PROMPT_LEN tokens and a number of new tokens
    each."""

    name: str
    new_tokens: tuple[int, ...]
    at_least: dict[torch.dtype, float]


def mixes() -> list[Mix]:
    lengths = random.Random(0)
    return [
        Mix("16 x 64", (64,) * 16, {torch.bfloat16: 1.5, torch.float32: 1.3}),
        Mix(
            "32 x 8..128",
            tuple(lengths.randint(8, 128) for _ in range(32)),
            {torch.bfloat16: 2.5, torch.float32: 1.5},
        ),
        Mix("1 x 64", (64,), {torch.bfloat16: 1.0, torch.float32: 1.0}),
    ]


def prompts(count: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Random token ids, fresh for every round, so that no prefix cache can help."""
    source = random.Random(seed)
    return [[source.randrange(3, vocab_size) for _ in range(PROMPT_LEN)] for _ in range(count)]


def transformers_model(dtype: torch.dtype) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    checkpoint = open_checkpoint("smollm2")
    model = LlamaForCausalLM(LlamaConfig(**checkpoint.config))
    state = dict(checkpoint.tensors())
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    return model.to(dtype).eval()


def run_transformers(
    model: torch.nn.Module, ids: list[list[int]], new_tokens: Sequence[int]
) -> None:
    batch = torch.tensor(ids)
    longest = max(new_tokens)
    with torch.inference_mode():
        out = model.generate(  # type: ignore[operator]
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=False,
            pad_token_id=2,
        )
    assert out.shape[1] == PROMPT_LEN + longest


def run_pagedkv(llm: LLM, ids: list[list[int]], new_tokens: Sequence[int]) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in new_tokens]
    outputs = llm.generate(ids, params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == list(new_tokens)


def seconds(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def measure(dtype: torch.dtype, rounds: int) -> list[rows.Row]:
    llm = LLM("smollm2", dtype=str(dtype).removeprefix("torch."))
    reference = transformers_model(dtype)
    vocab_size = 49152
    made = []
    for mix in mixes():
        ours, theirs = [], []
        for number in range(rounds + 1):  # round 0 warms both sides up
            ids = prompts(len(mix.new_tokens), vocab_size, seed=number)
            a = seconds(lambda i=ids, m=mix: run_pagedkv(llm, i, m.new_tokens))  # type: ignore[misc]
            b = seconds(lambda i=ids, m=mix: run_transformers(reference, i, m.new_tokens))  # type: ignore[misc]
            if number:
                ours.append(a)
                theirs.append(b)
        total = sum(mix.new_tokens)
        took, baseline = statistics.median(ours), statistics.median(theirs)
        limit = mix.at_least[dtype]
        made.append(
            rows.Row(
                name=f"generate {str(dtype).removeprefix('torch.')}",
                shape=f"{mix.name} new tokens, prompts of {PROMPT_LEN}",
                us=took * 1e6,
                rate=f"{total / took:.0f} tok/s (transformers {total / baseline:.0f})",
                baseline=baseline / took,
                limit=f">= {limit}x",
                holds=baseline / took >= limit,
            )
        )
    return made


def main() -> int:
    arguments = rows.parser(__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--dtype", choices=["float32", "bfloat16"], action="append")
    options = arguments.parse_args()
    names = options.dtype or ["bfloat16", "float32"]
    made = [row for name in names for row in measure(getattr(torch, name), options.rounds)]
    return rows.report("cpu-generate", made, save=options.save)


if __name__ == "__main__":
    sys.exit(main())
