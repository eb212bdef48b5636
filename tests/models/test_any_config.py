"""Any value in any place of a config.json: a model, or one clear ValueError; never a long loop, a
large allocation, or frequencies that are no numbers.
"""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import pytest
from tiny_families import FAMILIES, config_of

from pagedkv.models import ModelConfig
from pagedkv.models.rope import inverse_frequencies

JUNK: list[Any] = [
    *(None, True, False, 0, 1, -1, 3, 2**31 - 1, 2**31, 2**63, 10**400),
    *(0.0, -0.0, 0.5, 1e-320, 1e-12, 1e12, 1e29, 1e300, math.nan, math.inf, -math.inf),
    *("", "x", "1", [], [None], [1], ["x"], [[]], {}, {"a": 1}),
    *({"rope_type": 5}, {"rope_type": "yarn"}, {"rope_type": "linear", "factor": 1e-300}),
]
# What a file may have beside what transformers writes.
OTHERS = (
    *("head_dim", "layer_types", "sliding_window", "max_window_layers", "sliding_window_pattern"),
    *("rope_scaling", "rope_parameters", "rope_theta", "rope_local_base_freq", "n_inner"),
    *("partial_rotary_factor", "original_max_position_embeddings", "quantization_config"),
    *("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "attn_config"),
)
SCALINGS = (
    *("rope_type", "type", "factor", "low_freq_factor", "high_freq_factor", "beta_fast"),
    *("beta_slow", "mscale", "mscale_all_dim", "truncate", "attention_factor", "short_factor"),
    *("long_factor", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"),
)
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 4.0},
    "proportional": {"partial_rotary_factor": 0.5},
}


def is_read(config: dict[str, Any]) -> bool:
    """Whether a model is made of it; else it was refused."""
    try:
        found = ModelConfig.from_dict(config)
        for rope in (found.rope, found.local_rope):
            if rope is not None:
                frequencies, amplitude = inverse_frequencies(rope, 64)
                assert frequencies.isfinite().all(), config
                assert math.isfinite(amplitude), config
    except ValueError as error:
        if len(str(error)) > 1000:
            raise
        return False
    return True


def check_all(cases: list[dict[str, Any]]) -> None:
    tracemalloc.start()
    outcomes = {is_read(case) for case in cases}
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert outcomes == {True, False}
    assert peak < 16 * 2**20


@pytest.mark.parametrize("name", [name for name in FAMILIES if "," not in name])
def test_any_value_in_any_place_is_read_or_refused(name: str) -> None:
    config = config_of(name)
    assert is_read(config)
    keys = dict.fromkeys([*config, *OTHERS])
    check_all([{**config, key: junk} for key in keys for junk in JUNK])


@pytest.mark.parametrize("kind", KINDS)
def test_any_value_in_any_place_of_a_scaling_is_read_or_refused(kind: str) -> None:
    scaling = {"rope_type": kind, "rope_theta": 1000.0, **KINDS[kind]}
    config = config_of("llama")
    assert is_read({**config, "rope_parameters": scaling})
    check_all(
        [{**config, "rope_parameters": {**scaling, key: one}} for key in SCALINGS for one in JUNK]
    )
