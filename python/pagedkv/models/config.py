"""ModelConfig: what a model is made of, read once from Hugging Face's config.json and checked.

ConfigReader reads and checks single values; each architecture's file says which ones it wants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pagedkv.models.rope import RopeConfig

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
LAYER_TYPES = ("full_attention", "sliding_attention")
# Far above any real model; keep a corrupt file from becoming a huge loop or allocation.
_MAX_SIZE = 2**31 - 1
_MAX_LAYERS = 4096
_MAX_HEADS = 2**16
_MAX_HEAD_DIM = 256  # of the attention ops


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and choices of one model. Sizes count elements, heads, layers or tokens.

    max_position_embeddings is what the checkpoint states; longest_context how far its rotary
    scaling reaches, if that is further. norm_eps: of whatever norm the model has. rope: None where
    positions are learned. layer_windows [num_layers]: how many tokens a token sees in each layer,
    itself included; 0: all before it. attention_bias: of the projections of queries, keys and
    values; output_bias: of that behind attention. qk_norm: queries and keys are normed head by
    head before they are rotated. fused_weights: the checkpoint holds the projections of queries,
    keys and values as one tensor, and gate and up as another. attention_scale: None: head_dim **
    -0.5. Soft caps are those of attention's scores and of logits; 0: none. local_rope: of layers
    with a window, where it is another one. alibi_slopes [num_heads], or none. clip_qkv: the
    largest magnitude of queries, keys and values; 0: any.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float
    hidden_act: str
    rope: RopeConfig | None
    tie_word_embeddings: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    layer_windows: tuple[int, ...]
    qk_norm: bool = False
    fused_weights: bool = False
    attention_scale: float | None = None
    attention_soft_cap: float = 0.0
    logit_soft_cap: float = 0.0
    local_rope: RopeConfig | None = None
    alibi_slopes: tuple[float, ...] = ()
    clip_qkv: float = 0.0

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_heads}, not a multiple of "
                f"num_key_value_heads, which is {self.num_kv_heads}"
            )
        if self.head_dim > _MAX_HEAD_DIM:
            raise ValueError(
                f"head_dim is {self.head_dim}; heads of more than {_MAX_HEAD_DIM} elements are not "
                "supported"
            )

    @property
    def window(self) -> int:
        """How many tokens the cache must keep, the newest included; 0: all, since a layer sees all.

        Where layers alternate between a window and everything, K and V of all layers stay, since
        a block holds a token's K and V of every layer.
        """
        return 0 if 0 in self.layer_windows else max(self.layer_windows)

    @property
    def longest_context(self) -> int:
        """The largest max_model_len that load_model accepts."""
        scaled = 0 if self.rope is None else self.rope.scaled_context
        return max(self.max_position_embeddings, scaled)

    def share(self, num_ranks: int) -> ModelConfig:
        """What the first of so many tensor-parallel ranks computes, as a model of its own: of the
        heads, the KV heads, the feed-forward's inner size and the vocabulary the part that its
        weights have (models/parameters.py). Ranks beyond the number of KV heads share one.

        Raises:
            ValueError: one of them cannot be divided so.

        Example: 32 heads, 8 KV heads and 14,336 inner among 4 ranks: 8, 2 and 3,584.
        """
        kv_heads = self.num_kv_heads
        for name, number, divides in (
            ("num_attention_heads", self.num_heads, self.num_heads % num_ranks == 0),
            ("num_key_value_heads", kv_heads, not kv_heads % num_ranks or not num_ranks % kv_heads),
            ("intermediate_size", self.intermediate_size, not self.intermediate_size % num_ranks),
        ):
            if not divides:
                raise ValueError(
                    f"config: {name} is {number}, which cannot be divided among {num_ranks} ranks"
                )
        num_heads = self.num_heads // num_ranks
        return replace(
            self,
            num_heads=num_heads,
            num_kv_heads=max(1, kv_heads // num_ranks),
            intermediate_size=self.intermediate_size // num_ranks,
            vocab_size=-(-self.vocab_size // num_ranks),
            alibi_slopes=self.alibi_slopes[:num_heads],
        )

    @staticmethod
    def from_dict(config: Mapping[str, object]) -> ModelConfig:
        """Read a config.json.

        Raises:
            ValueError: the architecture is not supported, or a value is missing or out of range.
        """
        # The registry knows the architectures, and they know this class.
        from pagedkv.models.registry import family_of

        return family_of(config).read_config(config)


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """Reads values of a config.json by name; null counts as absent."""

    values: Mapping[str, object]

    def layers(self, key: str, default: int | None = None) -> int:
        """How many layers there are."""
        return self.size(key, default, _MAX_LAYERS)

    def heads(self, key: str, default: int | None = None) -> int:
        """How many heads there are."""
        return self.size(key, default, _MAX_HEADS)

    def size(self, key: str, default: int | None = None, most: int = _MAX_SIZE) -> int:
        """A whole number from 1 to most."""
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ValueError(f"config: {key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ValueError(f"config: {key} is {value!r:.99}, not a whole number from 1 to {most}")
        return value

    def positive(self, key: str, default: float) -> float:
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise ValueError(f"config: {key} is {value!r:.200}, not a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ValueError(f"config: {key} is {value!r:.200}, neither true nor false")
        return value

    def activation(self, key: str, allowed: tuple[str, ...] = ACTIVATIONS) -> str:
        """One of those allowed; the first where the file has none."""
        value = self.values.get(key)
        if value is None:
            return allowed[0]
        if value not in allowed:
            raise ValueError(f"config: {key} is {value!r:.200}; supported are {', '.join(allowed)}")
        return str(value)

    def layer_types(self, num_layers: int) -> list[str] | None:
        """Which layers have a window, as layer_types says it; None where it is absent."""
        given, kinds = self.values.get("layer_types"), LAYER_TYPES
        if given is None:
            return None
        if not isinstance(given, list) or len(given) != num_layers:
            raise ValueError(
                f"config: layer_types is {given!r:.200}, not a list of {num_layers} kinds"
            )
        for kind in given:
            if kind not in kinds:
                raise ValueError(
                    f"config: layer_types has {kind!r:.200}; supported are {', '.join(kinds)}"
                )
        return given

    def refuse(self, key: str, allowed: tuple[object, ...], why: str) -> None:
        """Raise unless the value of key is absent or allowed."""
        value = self.values.get(key)
        if value is not None and value not in allowed:
            raise ValueError(f"config: {key} is {value!r:.200}, {why}")
