"""Llama's variants and rotary scalings against transformers: logits of tiny random models that it
saved, through paged blocks. What all architectures must do: test_families.py.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from paged_run import PagedRun, cosine
from tiny_llama import reference_logits, saved, tiny_llama
from transformers import LlamaForCausalLM

from pagedkv.models import AttentionMetadata, CausalLM, LayerCache, load_model
from pagedkv.weights import open_checkpoint

HALF = [1.0 + 0.1 * i for i in range(5)]  # head_dim 10: five frequencies
LONG = [2.0 + 0.5 * i for i in range(5)]

VARIANTS: dict[str, dict[str, object]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True},
    "head_dim of its own": {"head_dim": 16},
    "odd number of heads per group": {"num_attention_heads": 10, "num_key_value_heads": 2},
    "one KV head": {"num_key_value_heads": 1},
    "as many KV heads as heads": {"num_key_value_heads": 4},
    "gelu": {"hidden_act": "gelu"},
    "gelu by tanh": {"hidden_act": "gelu_pytorch_tanh"},
    "small epsilon, other theta": {"rms_norm_eps": 1e-3, "rope_theta": 500.0},
    "one layer": {"num_hidden_layers": 1},
}
ROPE: dict[str, dict[str, object]] = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {
        "short_factor": HALF,
        "long_factor": LONG,
        "factor": 4.0,
        "original_max_position_embeddings": 24,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}
CASES = {
    **VARIANTS,
    **{
        f"rope {kind}": {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, **rest}}
        for kind, rest in ROPE.items()
    },
}


def ids_of(length: int, seed: int = 1, vocab_size: int = 97) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(vocab_size) for _ in range(length)]


def load(folder: Path, **options: object) -> CausalLM:
    checkpoint = open_checkpoint(folder)
    return load_model(
        checkpoint.config,
        checkpoint.tensors(),
        **{"dtype": torch.float32, "device": "cpu", **options},  # type: ignore[arg-type]
    )


@pytest.fixture
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[LlamaForCausalLM, CausalLM]:
    reference = tiny_llama(**CASES[request.param])
    return reference, load(saved(reference, tmp_path))


@pytest.mark.parametrize("pair", CASES, indirect=True)
@pytest.mark.parametrize("chunks", [[40], [1, 7, 4, 13, 15], [39, 1]], ids=str)
def test_logits_equal_those_of_transformers(
    pair: tuple[LlamaForCausalLM, CausalLM], chunks: list[int]
) -> None:
    reference, model = pair
    ids = ids_of(40)
    expected = reference_logits(reference, ids)
    run = PagedRun(model, num_seqs=3, max_len=40)
    logits = run.logits(1, ids, chunks)
    assert cosine(logits, expected) > 0.9999
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("length", [20, 64, 100])
def test_frequencies_that_depend_on_length_are_those_of_max_model_len(
    tmp_path: Path, kind: str, length: int
) -> None:
    """A sequence of exactly max_model_len tokens is what transformers computes in one pass."""
    reference = tiny_llama(**CASES[f"rope {kind}"])
    if kind == "longrope":
        length = min(length, 64)
    model = load(saved(reference, tmp_path), max_model_len=length)
    ids = ids_of(length)
    logits = PagedRun(model, num_seqs=1, max_len=length).logits(0, ids, [length - 7, 7])
    assert cosine(logits, reference_logits(reference, ids)) > 0.9999


def test_prefill_chunks_and_decodes_share_a_step_without_touching_each_other(
    tmp_path: Path,
) -> None:
    reference = tiny_llama()
    run = PagedRun(load(saved(reference, tmp_path)), num_seqs=3, max_len=40)
    texts = [ids_of(30, seed) for seed in range(3)]
    run.step({0: texts[0][:29]})
    mixed = run.step({0: texts[0][29:], 2: texts[2][:11], 1: texts[1][:3]})
    logits = run.model.compute_logits(mixed)
    for begin, end, seq, until in ((0, 1, 0, 30), (1, 12, 2, 11), (12, 15, 1, 3)):
        expected = reference_logits(reference, texts[seq][:until])[-(end - begin) :]
        torch.testing.assert_close(logits[begin:end], expected, rtol=1e-3, atol=1e-3)


def test_padding_writes_nothing_and_changes_nothing(tmp_path: Path) -> None:
    """Slot -1 and a sequence of length 0 are how a step is padded."""
    run = PagedRun(load(saved(tiny_llama(), tmp_path)), num_seqs=1, max_len=16)
    model, ids = run.model, ids_of(9)
    expected = run.step({0: ids})
    before = run.cache.clone()
    blocks = run.tables[0][:3]
    slots = [blocks[i // 4] * 4 + i % 4 for i in range(9)]
    padded = model.forward(
        torch.tensor([*ids, 0, 0]),
        torch.tensor([*range(9), 0, 0]),
        [LayerCache(layer[0], layer[1]) for layer in run.cache],
        AttentionMetadata(
            block_tables=torch.tensor([blocks, [2**31 - 1] * 3], dtype=torch.int32),
            seq_lens=torch.tensor([9, 0], dtype=torch.int32),
            query_start_loc=torch.tensor([0, 9, 11], dtype=torch.int32),
            slot_mapping=torch.tensor([*slots, -1, -1]),
            max_query_len=9,
        ),
    )
    assert torch.equal(padded[:9], expected)
    assert padded[9:].isfinite().all()
    assert torch.equal(run.cache.nan_to_num(1e9), before.nan_to_num(1e9))
