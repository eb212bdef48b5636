"""Steps of few rows through products that norm and add themselves, on the CPU: what a GPU runs for
small decodes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from paged_run import PagedRun, cosine
from tiny_llama import reference_logits, saved, tiny_llama

from pagedkv import ops
from pagedkv.models import linear, load_model
from pagedkv.weights import open_checkpoint

VARIANTS: dict[str, dict[str, object]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "gelu": {"hidden_act": "gelu"},
    "one layer": {"num_hidden_layers": 1},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(variant: str, tmp_path: Path, monkeypatch) -> None:
    streamed, normed = [], []
    real = ops.streamed_linear

    def counted(out: torch.Tensor, x: torch.Tensor, *rest: object, **more: object) -> None:
        streamed.append((x.shape[0], more["epilogue"]))
        if more["norm_weight"] is not None:
            normed.append(streamed[-1])
        real(out, x, *rest, **more)

    monkeypatch.setattr(linear, "streamed_rows", lambda *_: 12)
    monkeypatch.setattr(ops, "streamed_linear", counted)
    reference = tiny_llama(**VARIANTS[variant])
    checkpoint = open_checkpoint(saved(reference, tmp_path))
    model = load_model(
        checkpoint.config, checkpoint.tensors(), dtype=torch.float32, device=torch.device("cpu")
    )
    ids = [(7 * i * i + 3) % 97 for i in range(43)]
    # The 13 tokens are one row too many: the plain form, whose cache the others go on with. More
    # rows than 8 are normed by an op of their own.
    logits = PagedRun(model, num_seqs=2, max_len=43).logits(1, ids, [8, 13, 9, 1, 7, 1, 4])
    expected = reference_logits(reference, ids)
    assert cosine(logits, expected) > 0.9999
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    layers = reference.config.num_hidden_layers
    assert [rows for rows, what in streamed if what == "add"] == [
        rows for rows in (8, 9, 1, 7, 1, 4) for _ in range(2 * layers)
    ]
    assert max(rows for rows, _ in normed) == 8
