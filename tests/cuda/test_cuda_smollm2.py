"""SmolLM2 on a GPU: in fp32 the greedy answers of the CPU, in bf16 those of transformers up to
near-ties, which are printed. Skipped where the model was not fetched (`pagedkv fetch smollm2`, or
its file in PAGEDKV_CACHE_DIR/smollm2).
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from smollm2_questions import QUESTIONS

from pagedkv.config import EngineConfig
from pagedkv.engine import Engine
from pagedkv.sampling_params import SamplingParams
from pagedkv.weights import open_checkpoint
from pagedkv.weights.fetching import ALIASES, cache_dir

FILE = cache_dir() / "smollm2" / ALIASES["smollm2"].file_name
pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not FILE.exists(), reason=f"needs {FILE}"),
]

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
# A difference is accepted where the two best logits are closer than this many times the noise.
MAX_NOISES = 4.0

Answers = list[tuple[list[int], list[int]]]  # prompt and answer of each question


def answers(device: torch.device | str, dtype: str) -> Answers:
    """All questions in one batch."""
    config = EngineConfig.from_options(
        "smollm2", device=str(device), dtype=dtype, max_model_len=512, num_gpu_blocks_override=200
    )
    engine = Engine.from_config(config)
    assert engine.tokenizer is not None
    prompts = [
        engine.tokenizer.encode_chat([{"role": "user", "content": question}])
        for question in QUESTIONS
    ]
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, GREEDY)
    found = {}
    while engine.has_work:
        found |= {one.request_id: one for one in engine.step().finished}
    assert all(one.error is None for one in found.values())
    return [(prompt, found[str(i)].outputs[0].token_ids) for i, prompt in enumerate(prompts)]


def reference_logits(given: Answers, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What transformers says for each token of all answers, from the same weights: fp32
    [num_tokens, vocab_size]. It reads each answer in one pass.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    checkpoint = open_checkpoint("smollm2")
    model = LlamaForCausalLM(LlamaConfig(**checkpoint.config))
    missing, unexpected = model.load_state_dict(dict(checkpoint.tensors()), strict=False)
    assert (set(missing) - {"lm_head.weight"}, unexpected) == (set(), [])
    model.tie_weights()
    model = model.to(dtype).to(device).eval()
    found = []
    with torch.inference_mode():
        for prompt, answer in given:
            logits = model(torch.tensor([prompt + answer], device=device)).logits[0]
            found.append(logits[len(prompt) - 1 : -1].float())
    return torch.cat(found)


def near_ties(
    given: Answers, theirs: torch.Tensor, exact: torch.Tensor
) -> list[Mapping[str, float]]:
    """Tokens that are not the best of theirs, each with both tokens' logits and the gap in units of
    the noise, which is the root mean square of theirs - exact. exact: the same in fp32.
    """
    noise = float((theirs - exact).square().mean().sqrt())
    places = [(i, at) for i, (_, answer) in enumerate(given) for at in range(len(answer))]
    chosen = torch.tensor([given[i][1][at] for i, at in places], device=theirs.device)
    best = theirs.argmax(-1)
    found = []
    for row in (chosen != best).nonzero().flatten().tolist():
        ours, other = int(chosen[row]), int(best[row])
        gap = float(theirs[row, other] - theirs[row, ours])
        found.append(
            {
                "question": places[row][0],
                "position": places[row][1],
                "token": ours,
                "theirs": other,
                "logit": float(theirs[row, ours]),
                "their logit": float(theirs[row, other]),
                "fp32 logit": float(exact[row, ours]),
                "their fp32 logit": float(exact[row, other]),
                "gap": gap,
                "noises": gap / noise,
            }
        )
    print(f"noise of bf16 logits {noise:.4f}; {len(found)} of {len(places)} tokens differ")
    for one in found:
        print(", ".join(f"{name} {value:.4g}" for name, value in one.items()))
    return found


def test_greedy_answers_are_those_of_the_cpu(device: torch.device) -> None:
    assert answers(device, "float32") == answers("cpu", "float32")


def test_bf16_answers_are_those_of_transformers_up_to_near_ties(device: torch.device) -> None:
    given = answers(device, "bfloat16")
    exact = reference_logits(given, torch.float32, device)
    found = near_ties(given, reference_logits(given, torch.bfloat16, device), exact)
    assert len(found) < len(QUESTIONS) * GREEDY.max_tokens // 20
    assert all(one["noises"] < MAX_NOISES for one in found)


def test_another_token_is_found_and_measured(device: torch.device) -> None:
    given: Answers = [([5], [2, 1])]
    exact = torch.tensor([[0.0, 1.0, 3.0], [0.5, 0.25, 0.0]], device=device)
    theirs = exact + torch.tensor([[0.1, -0.1, 0.1], [0.1, -0.1, 0.1]], device=device)
    (one,) = near_ties(given, theirs, exact)
    assert (one["position"], one["token"], one["theirs"]) == (1, 1, 0)
    assert one["noises"] == pytest.approx(0.45 / 0.1, rel=1e-4)
