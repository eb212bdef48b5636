"""Models whose norms are folded into the products behind them: what a GPU runs in bf16, here on the
CPU, in fp32, where it must be what transformers makes of the weights as they are.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from paged_run import PagedRun, cosine
from tiny_families import FAMILIES, tiny_family
from tiny_llama import reference_logits, saved, tiny_llama

from pagedkv import ops
from pagedkv.models import linear, load_model, loading
from pagedkv.weights import open_checkpoint

FOLDING = [
    name
    for name, (architecture, options) in FAMILIES.items()
    if architecture in ("Llama", "Mistral", "Qwen2", "Qwen3", "Phi3")
    and not options.get("mlp_bias")
]
IDS = [(7 * i * i + 3) % 97 for i in range(43)]
CHUNKS = [8, 13, 9, 1, 7, 1, 4]


@pytest.fixture
def norms(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The norms that are ops of their own, as they run; norms are folded wherever they can be."""
    monkeypatch.setattr(loading, "folds_norms", lambda *_: True)
    found: list[str] = []
    for name in ("rms_norm", "fused_add_rms_norm"):
        real = getattr(ops, name)

        def counted(*operands: object, name: str = name, real=real) -> None:
            found.append(name)
            real(*operands)

        monkeypatch.setattr(ops, name, counted)
    return found


def paged(folder: Path, dtype: torch.dtype = torch.float32) -> PagedRun:
    checkpoint = open_checkpoint(folder)
    model = load_model(checkpoint.config, checkpoint.tensors(), dtype=dtype, device="cpu")
    return PagedRun(model, num_seqs=2, max_len=43, dtype=dtype)


@pytest.mark.parametrize("name", FOLDING)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path, norms: list[str]) -> None:
    reference = tiny_family(name)
    logits = paged(saved(reference, tmp_path)).logits(1, IDS, CHUNKS)
    expected = reference_logits(reference, IDS)
    assert cosine(logits, expected) > 0.9999
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    assert norms == ["rms_norm"] * len(CHUNKS)  # the last one of each step


@pytest.mark.parametrize("name", ["smollm", "qwen2", "qwen3", "phi3", "qwen3, biases, tied"])
def test_few_rows_are_streamed_with_the_same_weights(
    name: str, tmp_path: Path, norms: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "streamed_rows", lambda *_: 12)
    reference = tiny_family(name)
    logits = paged(saved(reference, tmp_path)).logits(1, IDS, CHUNKS)
    expected = reference_logits(reference, IDS)
    assert cosine(logits, expected) > 0.9999
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    # The feed-forward of 9 rows has a norm before each layer's streamed product.
    assert norms == ["rms_norm"] * (len(CHUNKS) + reference.config.num_hidden_layers)


@pytest.mark.parametrize("streamed_rows", [0, 12])
@pytest.mark.parametrize("name", ["smollm", "qwen3"])
@pytest.mark.usefixtures("norms")
def test_the_scales_of_rows_have_the_epsilon_of_their_norm(
    name: str, streamed_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "streamed_rows", lambda *_: streamed_rows)
    reference = tiny_family(name, rms_norm_eps=0.5)  # as large as the squares, so that it counts
    logits = paged(saved(reference, tmp_path)).logits(1, IDS, CHUNKS)
    torch.testing.assert_close(logits, reference_logits(reference, IDS), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("streamed_rows", [0, 12])
@pytest.mark.parametrize("hidden_act", ["gelu", "gelu_pytorch_tanh"])
def test_other_activations_finish_their_products_too(
    hidden_act: str, streamed_rows: int, tmp_path: Path, norms: list[str], monkeypatch
) -> None:
    monkeypatch.setattr(linear, "streamed_rows", lambda *_: streamed_rows)
    reference = tiny_llama(hidden_act=hidden_act, attention_bias=True)
    logits = paged(saved(reference, tmp_path)).logits(0, IDS, CHUNKS)
    torch.testing.assert_close(logits, reference_logits(reference, IDS), rtol=1e-3, atol=1e-3)
    assert norms == ["rms_norm"] * len(CHUNKS)


def test_with_biases_in_the_feed_forward_nothing_is_folded(
    tmp_path: Path, norms: list[str]
) -> None:
    reference = tiny_family("llama")
    logits = paged(saved(reference, tmp_path)).logits(0, IDS, [43])
    torch.testing.assert_close(logits, reference_logits(reference, IDS), rtol=1e-3, atol=1e-3)
    assert norms == ["rms_norm", *["fused_add_rms_norm"] * 6]


@pytest.mark.parametrize("name", FOLDING)
@pytest.mark.usefixtures("norms")
def test_bf16_is_as_close_to_fp32_as_transformers_is(name: str, tmp_path: Path) -> None:
    reference = tiny_family(name)
    ours = paged(saved(reference, tmp_path), torch.bfloat16).logits(0, IDS, CHUNKS).float()
    exact = reference_logits(reference, IDS)
    for parameter in reference.parameters():
        parameter.data = parameter.data.bfloat16()
    theirs = reference_logits(reference, IDS).float()
    assert (ours - exact).norm() < 2 * (theirs - exact).norm()


@pytest.mark.parametrize(
    ("dtype", "device", "folds"),
    [
        (torch.bfloat16, "cuda", True),
        (torch.bfloat16, "cpu", False),
        (torch.float16, "cuda", False),
        (torch.float32, "cuda", False),
    ],
)
def test_what_is_folded(dtype: torch.dtype, device: str, folds: bool) -> None:
    assert loading.folds_norms(dtype, torch.device(device)) is folds
