"""Rotary position embedding: the angle of every position, for all kinds of `rope_scaling`.

A model rotates by one table [max_model_len, 2 * num_frequencies] for all its tokens. Where the
frequencies depend on the length of the sequence (dynamic, longrope), they are those of a sequence
of max_model_len tokens: keys in the cache then never have to be rotated again, and a token's key
does not depend on how its prompt was cut into chunks or shared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": (),
}
_OTHER_NAMES = {"su": "longrope"}  # as Phi-3's first files have it
_BESIDE = ("original_max_position_embeddings", "rope_theta", "partial_rotary_factor")
_KINDS_OF_LENGTH = ("yarn", "longrope", "llama3")
_LEAST = 1e-12  # of numbers, but for 0; their inverse is the largest


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """rope_scaling or rope_parameters of a config.json, checked.

    rotary_dim: how many of a head's elements are rotated. original_max_len: the length (tokens)
    the model was trained on before its context was stretched. Absent values are None.
    """

    kind: str
    theta: float
    rotary_dim: int
    head_dim: int
    original_max_len: int
    factor: float | None = None
    attention_factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    proportion: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def scaled_context(self) -> int:
        """Tokens that the scaling stretches the context to, as far as the configuration says."""
        if self.kind in ("linear", "dynamic", "yarn") and self.factor is not None:
            return int(self.original_max_len * self.factor)
        return self.original_max_len


def read_rope(
    values: Mapping[str, object], *, head_dim: int, max_len: int, default_theta: float = 10000.0
) -> RopeConfig:
    """Read rope_parameters (transformers 5) or rope_theta with rope_scaling (before).

    Args:
        values: the whole config.json. max_len: its max_position_embeddings.

    Raises:
        ValueError: the kind is unknown, or a value is missing or out of range.
    """
    given = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"config: rope_scaling is {given!r:.200}, not an object")
    kind = given.get("rope_type") or given.get("type") or "default"
    kind = _OTHER_NAMES.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in _NEEDED:
        raise ValueError(
            f"config: rope_scaling of the kind {kind!r:.200} is not supported; "
            f"supported are {', '.join(_NEEDED)}"
        )
    missing = [key for key in _NEEDED[kind] if given.get(key) is None]
    if missing:
        raise ValueError(f"config: rope_scaling of the kind {kind!r} lacks {', '.join(missing)}")

    # Some files state the original length beside rope_scaling, which then counts.
    own = {key: values[key] for key in _BESIDE if values.get(key) is not None}
    read = _Numbers({**own, **given} | {key: own[key] for key in _BESIDE[:1] if key in own})
    partial = read.number("partial_rotary_factor") or 1.0
    if not 0 < partial <= 1:
        raise ValueError(f"config: partial_rotary_factor is {partial}, not above 0 and at most 1")
    # A proportional embedding spans the whole head; its slow part just does not turn.
    rotary_dim = head_dim if kind == "proportional" else int(head_dim * partial)
    original_max_len = read.length(_BESIDE[0], max_len) if kind in _KINDS_OF_LENGTH else max_len
    factor = read.number("factor")
    if factor is None and kind in ("yarn", "longrope"):
        factor = max_len / original_max_len
    theta = read.number("rope_theta")
    rope = RopeConfig(
        kind=kind,
        theta=default_theta if theta is None else theta,
        rotary_dim=rotary_dim,
        head_dim=head_dim,
        original_max_len=original_max_len,
        factor=factor,
        attention_factor=read.number("attention_factor"),
        low_freq_factor=read.number("low_freq_factor"),
        high_freq_factor=read.number("high_freq_factor"),
        beta_fast=read.number("beta_fast") or 32.0,
        beta_slow=read.number("beta_slow") or 1.0,
        mscale=read.number("mscale"),
        mscale_all_dim=read.number("mscale_all_dim"),
        truncate=read.flag("truncate", True),
        proportion=partial,
        short_factor=read.numbers("short_factor") if kind == "longrope" else (),
        long_factor=read.numbers("long_factor") if kind == "longrope" else (),
    )
    _check(rope)
    return rope


@dataclass(frozen=True, slots=True)
class _Numbers:
    values: Mapping[str, object]

    def number(self, key: str) -> float | None:
        """A finite number that is not negative, or None where there is none."""
        value = self.values.get(key)
        return None if value is None else self._checked(key, value)

    def length(self, key: str, default: int) -> int:
        """Tokens, of which two or more are trained on; some files write them as 4096.0."""
        given = self.number(key)
        value = default if given is None else int(given)
        if not 2 <= value < 2**31:
            raise ValueError(f"config: {key} is {value}, not from 2 to {2**31 - 1}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise ValueError(
                f"config: {key} of rope_scaling is {value!r:.200}, neither true nor false"
            )
        return default if value is None else value

    def numbers(self, key: str) -> tuple[float, ...]:
        value = self.values.get(key)
        if not isinstance(value, list):
            raise ValueError(
                f"config: {key} of rope_scaling is {value!r:.200}, not a list of numbers"
            )
        return tuple(self._checked(key, one) for one in value)

    @staticmethod
    def _checked(key: str, value: object) -> float:
        # What is computed of a number stays finite between these bounds.
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not (value == 0 or _LEAST <= value <= 1 / _LEAST)
        ):
            raise ValueError(
                f"config: {key} of rope_scaling is {value!r:.200}, neither 0 nor a number from "
                f"{_LEAST:g} to {1 / _LEAST:g}"
            )
        return float(value)


def _check(rope: RopeConfig) -> None:
    if rope.rotary_dim < 2 or rope.rotary_dim % 2:
        raise ValueError(f"config: {rope.rotary_dim} rotated elements of a head; it must be even")
    if rope.theta <= 1:
        raise ValueError(f"config: rope_theta is {rope.theta}, not above 1")
    if rope.factor is not None and rope.factor <= 0:
        raise ValueError(f"config: factor of rope_scaling is {rope.factor}, not above 0")
    if rope.kind == "dynamic" and rope.rotary_dim < 4:
        raise ValueError("config: rope_scaling of the kind 'dynamic' needs a head_dim of 4 or more")
    low, high = rope.low_freq_factor, rope.high_freq_factor
    if low is not None and high is not None and not 0 < low < high:
        raise ValueError(
            f"config: low_freq_factor is {low} and high_freq_factor {high} in rope_scaling; "
            "0 < low < high must hold"
        )
    for name, factors in (("short_factor", rope.short_factor), ("long_factor", rope.long_factor)):
        if rope.kind != "longrope":
            continue
        if len(factors) != rope.rotary_dim // 2 or min(factors) <= 0:
            raise ValueError(
                f"config: {name} of rope_scaling must be {rope.rotary_dim // 2} numbers above 0"
            )


def cos_sin_table(rope: RopeConfig, max_model_len: int, device: torch.device) -> torch.Tensor:
    """fp32 [max_model_len, 2 * num_frequencies]: cosines, then sines, of position * frequency."""
    frequencies, amplitude = inverse_frequencies(rope, max_model_len)
    positions = torch.arange(max_model_len, dtype=torch.float32)
    angles = positions[:, None] * frequencies[None, :]
    return torch.cat((angles.cos() * amplitude, angles.sin() * amplitude), dim=1).to(device)


def inverse_frequencies(rope: RopeConfig, max_model_len: int) -> tuple[torch.Tensor, float]:
    """fp32 [num_frequencies] in radians per token, and the factor on cosines and sines."""
    return _KINDS[rope.kind](rope, max_model_len)


def _powers(rope: RopeConfig, theta: float) -> torch.Tensor:
    """theta ** (2 i / rotary_dim), i = 0, 1, ..., rotary_dim / 2 - 1."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    return torch.as_tensor(theta**exponents)


def _default(rope: RopeConfig, max_model_len: int) -> tuple[torch.Tensor, float]:
    return 1.0 / _powers(rope, rope.theta), 1.0


def _linear(rope: RopeConfig, max_model_len: int) -> tuple[torch.Tensor, float]:
    """Position interpolation: every position is divided by factor."""
    return 1.0 / _powers(rope, rope.theta) / _given(rope.factor), 1.0


def _dynamic(rope: RopeConfig, max_model_len: int) -> tuple[torch.Tensor, float]:
    """NTK-aware scaling: a larger base, so that slow dimensions stretch more than fast ones."""
    factor, dim = _given(rope.factor), rope.rotary_dim
    stretch = max(max_model_len, rope.original_max_len) / rope.original_max_len
    theta = rope.theta * (factor * stretch - (factor - 1)) ** (dim / (dim - 2))
    return 1.0 / _powers(rope, theta), 1.0


def _yarn(rope: RopeConfig, max_model_len: int) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv 2309.00071): dimensions that turn often within the original context stay, those
    that turn seldom are interpolated, with a ramp in between."""
    factor, dim = _given(rope.factor), rope.rotary_dim
    powers = _powers(rope, rope.theta)

    def dimension_turning(times: float) -> float:
        """The (fractional) dimension that turns so many times within the original context."""
        return (
            dim
            * math.log(rope.original_max_len / (times * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low, high = dimension_turning(rope.beta_fast), dimension_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = (high - low) or 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    stays = 1 - ramp
    frequencies = 1.0 / (factor * powers) * (1 - stays) + 1.0 / powers * stays
    return frequencies, _yarn_amplitude(rope, factor)


def _yarn_amplitude(rope: RopeConfig, factor: float) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(times: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * times * math.log(factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def _longrope(rope: RopeConfig, max_model_len: int) -> tuple[torch.Tensor, float]:
    """LongRoPE: a measured divisor for each frequency, one list up to the original length and one
    beyond it."""
    is_long = max_model_len > rope.original_max_len
    divisors = torch.tensor(rope.long_factor if is_long else rope.short_factor)
    amplitude = rope.attention_factor
    if amplitude is None:
        factor = _given(rope.factor)
        stretch = math.log(factor) / math.log(rope.original_max_len) if factor > 1 else 0.0
        amplitude = math.sqrt(1 + stretch)
    return 1.0 / (divisors * _powers(rope, rope.theta)), amplitude


def _llama3(rope: RopeConfig, max_model_len: int) -> tuple[torch.Tensor, float]:
    """Llama 3.1: long waves are divided by factor, short ones stay, a blend in between."""
    factor = _given(rope.factor)
    low, high = _given(rope.low_freq_factor), _given(rope.high_freq_factor)
    plain = 1.0 / _powers(rope, rope.theta)
    waves = rope.original_max_len / (2 * math.pi / plain)  # within the original context
    stays = ((waves - low) / (high - low)).clamp(0, 1)
    return (1 - stays) * plain / factor + stays * plain, 1.0


def _proportional(rope: RopeConfig, max_model_len: int) -> tuple[torch.Tensor, float]:
    """Only the fastest part of the head's frequencies turns, the rest stands still."""
    plain = 1.0 / _powers(rope, rope.theta)
    num_turning = int(rope.proportion * rope.head_dim // 2)
    plain[num_turning:] = 0
    return plain / (rope.factor or 1.0), 1.0


def _given(value: float | None) -> float:
    assert value is not None, "read_rope checked that this kind has it"
    return value


_KINDS: dict[str, Callable[[RopeConfig, int], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}
