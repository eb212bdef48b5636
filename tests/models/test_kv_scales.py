"""Scales of an fp8 cache in checkpoints: the names that are known, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_llama import tiny_llama

from pagedkv.models import CausalLM, load_model

Change = Callable[[dict[str, torch.Tensor]], object]


def loaded(scales: dict[str, torch.Tensor], **config: Any) -> CausalLM:
    reference = tiny_llama()
    return load_model(
        reference.config.to_dict() | {"architectures": ["LlamaForCausalLM"]} | config,
        (reference.state_dict() | scales).items(),
        dtype=torch.float32,
        device="cpu",
    )


def named(key_name: str, value_name: str) -> dict[str, torch.Tensor]:
    """K of layer i has scale i + 1, V 8 times that."""
    found = {}
    for layer in range(3):
        name = f"model.layers.{layer}.self_attn."
        found[name + key_name] = torch.tensor(layer + 1.0)
        found[name + value_name] = torch.tensor([8 * (layer + 1.0)], dtype=torch.bfloat16)
    return found


@pytest.mark.parametrize(
    "names",
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
        ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    ],
    ids="/".join,
)
def test_the_scales_of_each_way_of_naming_them_are_found(names: tuple[str, str]) -> None:
    scales = loaded(named(*names)).kv_scales
    assert scales is not None
    assert scales.dtype == torch.float32
    assert scales.tolist() == [[[i, i], [8 * i, 8 * i]] for i in (1.0, 2.0, 3.0)]


def test_one_scale_may_hold_for_both_and_one_for_each_head() -> None:
    found = {}
    for layer in range(3):
        found[f"model.layers.{layer}.self_attn.kv_scale"] = torch.tensor([0.5, 4.0 + layer])
    scales = loaded(found).kv_scales
    assert scales is not None
    assert scales.tolist() == [[[0.5, 4.0 + i]] * 2 for i in range(3)]


def test_scales_of_products_in_8_bits_are_left_and_a_checkpoint_without_scales_has_none() -> None:
    others = {
        f"model.layers.{layer}.self_attn.{name}": torch.tensor(1.0)
        for layer in range(3)
        for name in ("q_scale", "attn.q_scale", "prob_scale", "q_proj.output_scale")
    }
    assert loaded(others).kv_scales is None
    assert loaded({}).kv_scales is None
    assert loaded(named("k_scale", "v_scale") | others).kv_scales is not None


FIRST = "model.layers.0.self_attn.k_scale"
WRONG: dict[str, tuple[Change, str]] = {
    "a part is missing": (
        lambda scales: [scales.pop(name) for name in list(scales) if "1.self_attn.v" in name],
        "scales of an fp8 cache, but 1 are missing: V of layer 1",
    ),
    "of no layer": (
        lambda scales: scales.update({"model.layers.3.self_attn.k_scale": torch.tensor(1.0)}),
        "model.layers.3.self_attn.k_scale: the model has 3 layers",
    ),
    "another shape": (
        lambda scales: scales.update({FIRST: torch.ones(3)}),
        r"k_scale is torch.float32 \[3\], expected 1 or 2 floats",
    ),
    "whole numbers": (
        lambda scales: scales.update({FIRST: torch.tensor(1)}),
        r"k_scale is torch.int64 \[\], expected 1 or 2 floats",
    ),
    "zero": (
        lambda scales: scales.update({FIRST: torch.tensor(0.0)}),
        r"k_scale is \[0.0\], expected finite numbers above 0",
    ),
    "not a number": (
        lambda scales: scales.update({FIRST: torch.tensor([1.0, float("nan")])}),
        r"k_scale is \[1.0, nan\], expected finite numbers above 0",
    ),
    "two for one": (
        lambda scales: scales.update({"model.layers.0.self_attn.kv_scale": torch.tensor(1.0)}),
        "there is another scale of the same",
    ),
    "a name that is not one": (
        lambda scales: scales.update({"model.layers.0.self_attn.k_proj.v_scale": torch.ones(1)}),
        r"unexpected tensors \(1\): model.layers.0.self_attn.k_proj.v_scale",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_scales_are_refused_in_words(case: str) -> None:
    change, message = WRONG[case]
    scales = named("k_scale", "v_scale")
    change(scales)
    with pytest.raises(ValueError, match=message):
        loaded(scales)


CACHE_ONLY = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"},
}


def test_a_quantisation_of_the_cache_alone_is_no_hindrance() -> None:
    model = loaded(named("k_scale", "v_scale"), quantization_config=CACHE_ONLY)
    assert model.kv_scales is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config_groups": {"group_0": {}}}, "quantised safetensors are not supported"),
        ({"kv_cache_scheme": None}, "quantised safetensors are not supported"),
        (
            {"kv_cache_scheme": {"num_bits": 4, "type": "int"}},
            "kv_cache_scheme has type 'int' and num_bits 4; supported are 'float' and 8",
        ),
    ],
)
def test_a_quantisation_of_more_than_the_cache_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        loaded(named("k_scale", "v_scale"), quantization_config=CACHE_ONLY | changes)
