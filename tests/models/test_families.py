"""Every architecture against transformers: tiny random models that it saved, loaded here by their
config.json and safetensors, run through paged blocks. Engines on them: tests/engine.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_run import PagedRun, cosine, greedy
from tiny_families import FAMILIES, tiny_family
from tiny_llama import reference_logits, saved

from pagedkv.models import load_model
from pagedkv.weights import open_checkpoint


def ids_of(length: int, seed: int = 1) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(97) for _ in range(length)]


def paged(folder: Path, dtype: torch.dtype = torch.float32) -> PagedRun:
    checkpoint = open_checkpoint(folder)
    model = load_model(checkpoint.config, checkpoint.tensors(), dtype=dtype, device="cpu")
    return PagedRun(model, num_seqs=3, max_len=120, dtype=dtype)


def in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """The model with parameters of this dtype; buffers, such as rotary frequencies, stay."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


@pytest.mark.parametrize("chunks", [[40], [1, 7, 4, 13, 15], [39, 1]], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_transformers(name: str, chunks: list[int], tmp_path: Path) -> None:
    reference, ids = tiny_family(name), ids_of(40)
    expected = reference_logits(reference, ids)
    logits = paged(saved(reference, tmp_path)).logits(1, ids, chunks)
    assert cosine(logits, expected) > 0.9999
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_text_equals_that_of_transformers_for_64_tokens(name: str, tmp_path: Path) -> None:
    reference = tiny_family(name)
    prompts = [ids_of(length, length) for length in (1, 13, 30)]
    run = paged(saved(reference, tmp_path))
    for prompt, found in zip(prompts, greedy(run, prompts, 64), strict=True):
        logits = reference_logits(reference, prompt + found)
        assert found == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FAMILIES)
def test_weights_stored_in_half_precision_are_those_of_transformers(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    reference, ids = in_dtype(tiny_family(name), dtype), ids_of(40)
    run = paged(saved(reference, tmp_path))
    logits = run.logits(0, ids, [33, 7])
    expected = reference_logits(in_dtype(reference, torch.float32), ids)
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FAMILIES)
def test_half_precision_is_as_close_to_fp32_as_transformers_is(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    reference, ids = tiny_family(name), ids_of(40)
    ours = paged(saved(reference, tmp_path), dtype).logits(0, ids, [33, 7]).float()
    exact = reference_logits(reference, ids)
    theirs = reference_logits(in_dtype(reference, dtype), ids).float()
    assert ours.isfinite().all()
    assert (ours - exact).norm() < 2 * (theirs - exact).norm()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_tensor_of_a_checkpoint_is_needed(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(saved(tiny_family(name), tmp_path))
    tensors: dict[str, Any] = dict(checkpoint.tensors())
    for missing in tensors:
        rest = [(key, tensor) for key, tensor in tensors.items() if key != missing]
        with pytest.raises(ValueError, match=rf"missing tensors \(1\): {missing}"):
            load_model(checkpoint.config, rest, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("qkv_proj", lambda t: t[:-1], r"qkv_proj.weight is \[79, 40\], expected \[80, 40\]"),
        (
            "gate_up_proj",
            lambda t: t.T,
            r"gate_up_proj.weight is \[40, 112\], expected \[112, 40\]",
        ),
    ],
)
def test_a_fused_tensor_of_another_shape_is_refused_by_its_name(
    name: str, changed: Any, message: str, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(saved(tiny_family("phi3"), tmp_path))
    tensors = [(key, changed(t) if name in key else t) for key, t in checkpoint.tensors()]
    with pytest.raises(ValueError, match=message):
        load_model(checkpoint.config, tensors, dtype=torch.float32, device="cpu")


def test_a_gpt2_whose_names_lack_their_beginning_is_the_same_model(tmp_path: Path) -> None:
    """As its first release has them, with the causal masks that it carries."""
    checkpoint = open_checkpoint(saved(tiny_family("gpt2"), tmp_path))
    tensors = dict(checkpoint.tensors())
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 128, 128)
    bare["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    logits = []
    for stored in (tensors, bare):
        model = load_model(checkpoint.config, stored.items(), dtype=torch.float32, device="cpu")
        logits.append(PagedRun(model, num_seqs=1, max_len=40).logits(0, ids_of(40), [40]))
    assert torch.equal(*logits)
    both = [*tensors.items(), ("ln_f.bias", bare["ln_f.bias"])]
    with pytest.raises(ValueError, match=r"transformer\.ln_f\.bias appears twice"):
        load_model(checkpoint.config, both, dtype=torch.float32, device="cpu")


def test_a_gpt2_takes_no_more_positions_than_it_has_learned(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(saved(tiny_family("gpt2"), tmp_path))
    with pytest.raises(ValueError, match="max_model_len is 129, but the model allows 1 to 128"):
        load_model(
            checkpoint.config,
            checkpoint.tensors(),
            dtype=torch.float32,
            device="cpu",
            max_model_len=129,
        )
