"""Rotary frequencies of every kind, one by one against transformers; refusals by their message."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pagedkv.models.rope import cos_sin_table, inverse_frequencies, read_rope

HEAD_DIM = 64
SHORT = [1.0 + 0.01 * i for i in range(HEAD_DIM // 2)]
LONG = [1.5 + 0.2 * i for i in range(HEAD_DIM // 2)]
LENGTHS = {"factor": 8.0, "original_max_position_embeddings": 1024}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES: dict[str, dict[str, object]] = {
    "default": {},
    "linear": {"factor": 2.5},
    "dynamic": {"factor": 4.0},
    "yarn": LENGTHS,
    "yarn, smooth ends": {**LENGTHS, "truncate": False},
    "yarn, other turns": {**LENGTHS, "beta_fast": 20.0, "beta_slow": 2.5},
    "yarn, one turn for both ends": {**LENGTHS, "beta_fast": 1.0, "beta_slow": 1.0},
    "yarn, given amplitude": {**LENGTHS, "attention_factor": 0.7},
    "yarn, two scales": {**LENGTHS, "mscale": 1.2, "mscale_all_dim": 0.6},
    "yarn, length not given": {"factor": 4.0},
    "yarn, factor below one": {"factor": 0.5, "original_max_position_embeddings": 16384},
    "longrope": {"short_factor": SHORT, "long_factor": LONG, **LENGTHS},
    "longrope, factor not given": {
        "short_factor": SHORT,
        "long_factor": LONG,
        "original_max_position_embeddings": 1024,
    },
    "longrope, given amplitude": {
        "short_factor": SHORT,
        "long_factor": LONG,
        "attention_factor": 1.3,
        **LENGTHS,
    },
    "llama3": {**LENGTHS, **BANDS},
    "llama3, narrow": {**LENGTHS, "low_freq_factor": 1.9, "high_freq_factor": 2.0},
    "proportional": {"partial_rotary_factor": 0.25},
    "proportional, stretched": {"partial_rotary_factor": 0.4, "factor": 2.0},
    "linear, half a head": {"factor": 2.0, "partial_rotary_factor": 0.5},
    "llama3, half a head": {**LENGTHS, **BANDS, "partial_rotary_factor": 0.5},
}


def parameters_of(case: str, theta: float) -> dict[str, object]:
    return {"rope_type": case.split(",")[0], "rope_theta": theta, **CASES[case]}


def reference(parameters: dict[str, object], length: int) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=8192,
        rope_parameters=dict(parameters),
    )
    if parameters["rope_type"] == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[str(parameters["rope_type"])](config, seq_len=length)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("length", [512, 8192, 20000])
def test_every_frequency_equals_that_of_transformers(case: str, theta: float, length: int) -> None:
    parameters = parameters_of(case, theta)
    expected, amplitude = reference(parameters, length)
    config = {"rope_parameters": parameters, "max_position_embeddings": 8192}
    rope = read_rope(config, head_dim=HEAD_DIM, max_len=8192)
    found, scale = inverse_frequencies(rope, length)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert scale == pytest.approx(amplitude, rel=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_old_and_new_spelling_are_the_same(case: str) -> None:
    """Before transformers 5: rope_theta beside rope_scaling, with "type" in the oldest files."""
    new = parameters_of(case, 5000.0)
    scaling = {key: value for key, value in new.items() if key != "rope_theta"}
    oldest = {**scaling, "type": scaling["rope_type"]}
    del oldest["rope_type"]
    read = [
        read_rope(config, head_dim=HEAD_DIM, max_len=8192)
        for config in (
            {"rope_parameters": new},
            {"rope_scaling": scaling, "rope_theta": 5000.0},
            {"rope_scaling": oldest, "rope_theta": 5000.0},
        )
    ]
    assert read[0] == read[1] == read[2]
    assert read[0].theta == 5000.0


def test_a_length_beside_rope_scaling_counts_as_in_transformers() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}
    config = {"rope_scaling": scaling, "original_max_position_embeddings": 2048}
    assert read_rope(config, head_dim=HEAD_DIM, max_len=8192).original_max_len == 2048


@pytest.mark.parametrize("scaling", [None, {}])
def test_without_scaling_there_are_plain_frequencies(scaling: object) -> None:
    rope = read_rope({"rope_scaling": scaling}, head_dim=4, max_len=16)
    assert (rope.kind, rope.theta) == ("default", 10000.0)
    assert inverse_frequencies(rope, 16)[0].tolist() == pytest.approx([1.0, 0.01])


def test_the_table_holds_cosines_then_sines_of_each_position() -> None:
    scaling = {"rope_type": "yarn", "factor": 2.0, "attention_factor": 0.5}
    rope = read_rope({"rope_scaling": scaling}, head_dim=8, max_len=64)
    frequencies, _ = inverse_frequencies(rope, 64)
    table = cos_sin_table(rope, 64, torch.device("cpu"))
    assert table.shape == (64, 8)
    assert table.dtype == torch.float32
    torch.testing.assert_close(table[13, :4], torch.cos(13 * frequencies) * 0.5)
    torch.testing.assert_close(table[13, 4:], torch.sin(13 * frequencies) * 0.5)


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 4096),
        ({"rope_type": "linear", "factor": 4.0}, 16384),
        ({"rope_type": "dynamic", "factor": 2.0}, 8192),
        ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024}, 8192),
        ({"rope_type": "llama3", **BANDS, **LENGTHS}, 1024),
    ],
)
def test_how_far_a_scaling_reaches(scaling: object, longest: int) -> None:
    assert read_rope({"rope_scaling": scaling}, head_dim=8, max_len=4096).scaled_context == longest


LISTS = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "ntk"}, "'ntk' is not supported; supported are default, linear, dynamic"),
        ({"rope_type": ["yarn"]}, r"kind \['yarn'\] is not supported"),
        ("yarn", "rope_scaling is 'yarn', not an object"),
        ({"rope_type": "linear"}, "kind 'linear' lacks factor"),
        ({"rope_type": "llama3", "factor": 2.0}, "lacks low_freq_factor, high_freq_factor"),
        ({"rope_type": "longrope"}, "lacks short_factor, long_factor"),
        ({"rope_type": "linear", "factor": 0.0}, "factor of rope_scaling is 0.0, not above 0"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor of rope_scaling is nan"),
        ({"rope_type": "linear", "factor": float("inf")}, "factor of rope_scaling is inf"),
        ({"rope_type": "linear", "factor": -1.0}, "factor of rope_scaling is -1.0"),
        ({"rope_type": "linear", "factor": "2"}, "factor of rope_scaling is '2'"),
        ({"rope_type": "linear", "factor": True}, "factor of rope_scaling is True"),
        ({**LISTS, "short_factor": 3}, "short_factor of rope_scaling is 3, not a list"),
        ({**LISTS, "long_factor": [1.0]}, "long_factor of rope_scaling must be 4 numbers above 0"),
        ({**LISTS, "short_factor": [0.0] * 4}, "short_factor of rope_scaling must be 4 numbers"),
        ({**LISTS, "short_factor": ["1"] * 4}, "short_factor of rope_scaling is '1'"),
        ({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0},
         "low_freq_factor is 4.0 and high_freq_factor 1.0"),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1},
         "original_max_position_embeddings is 1, not from 2 to"),
        ({"rope_type": "yarn", "beta_fast": 1e-13}, "beta_fast of rope_scaling is 1e-13, neither"),
        ({"rope_type": "linear", "factor": 1e13}, "nor a number from 1e-12 to 1e[+]12"),
        ({"rope_type": "yarn", "truncate": 1}, "truncate of rope_scaling is 1, neither true nor"),
        ({"rope_theta": 1.0}, "rope_theta is 1.0, not above 1"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 1.5},
         "partial_rotary_factor is 1.5, not above 0 and at most 1"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.4},
         "3 rotated elements of a head; it must be even"),
    ],
)  # fmt: skip
def test_a_scaling_that_cannot_be_is_refused(scaling: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_rope({"rope_scaling": scaling}, head_dim=8, max_len=4096)


def test_dynamic_scaling_needs_more_than_one_frequency() -> None:
    with pytest.raises(ValueError, match="needs a head_dim of 4 or more"):
        read_rope({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, head_dim=2, max_len=64)
