"""Scales of an fp8 cache, as checkpoints carry them beside their weights: one number of K and one
of V for each layer, or for each KV head of it; stored value * scale = real value.

The names are those that llm-compressor, AutoFP8 and ModelOpt write and vLLM reads.
"""

from __future__ import annotations

import re

import torch

from pagedkv.models.config import ModelConfig

# kv_scale holds for both. output_scale is a scale of the projection's result, which is K or V.
_OF_LAYER = re.compile(
    r"model\.layers\.(?P<layer>\d+)\.self_attn\.(?:"
    r"(?:attn\.)?(?P<alone>[kv]|kv)_scale|"
    r"(?P<projection>[kv])_proj\.(?:(?P=projection)_scale|output_scale)|"
    r"qkv_proj\.(?P<fused>[kv])_scale)"
)
# Of products that are made in 8 bits elsewhere; here queries and weights of attention keep theirs.
_NOT_OURS = re.compile(
    r"model\.layers\.\d+\.self_attn\.(?:(?:attn\.)?(?:q|prob)_scale|q_proj\.output_scale)"
)
_SHOWN = 4


class KVScaleReader:
    """Takes a checkpoint's scales one by one."""

    def __init__(self, config: ModelConfig) -> None:
        self._num_layers = config.num_layers
        self._num_heads = config.num_kv_heads
        self._found: dict[tuple[int, int], torch.Tensor] = {}  # (layer, 0: K, 1: V)

    def take(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether name is that of a scale; it is kept then.

        Raises:
            ValueError: it is one, of a layer that the model does not have, of another shape, not
                above 0, or has been taken already.
        """
        match = _OF_LAYER.fullmatch(name)
        if match is None:
            return _NOT_OURS.fullmatch(name) is not None
        layer = int(match["layer"])
        if layer >= self._num_layers:
            raise ValueError(f"{name}: the model has {self._num_layers} layers")
        if tensor.numel() not in (1, self._num_heads) or not tensor.dtype.is_floating_point:
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}, expected 1 or {self._num_heads} "
                "floats"
            )
        values = tensor.detach().to("cpu", torch.float32).flatten()
        if not bool(((values > 0) & values.isfinite()).all()):
            raise ValueError(f"{name} is {values.tolist()}, expected finite numbers above 0")
        whose = match["alone"] or match["projection"] or match["fused"]
        for part in ("k", "v") if whose == "kv" else (whose,):
            key = layer, "kv".index(part)
            if key in self._found:
                raise ValueError(f"{name}: there is another scale of the same {part.upper()}")
            self._found[key] = values.expand(self._num_heads)
        return True

    def scales(self) -> torch.Tensor | None:
        """fp32 [num_layers, 2, num_kv_heads] on the CPU; None where the checkpoint has none.

        Raises:
            ValueError: it has some, but not all.
        """
        if not self._found:
            return None
        parts = [(layer, part) for layer in range(self._num_layers) for part in (0, 1)]
        lacking = [
            f"{'KV'[part]} of layer {at}" for at, part in parts if (at, part) not in self._found
        ]
        if lacking:
            raise ValueError(
                f"the checkpoint has scales of an fp8 cache, but {len(lacking)} are missing: "
                f"{', '.join([*lacking[:_SHOWN], *(['...'] if len(lacking) > _SHOWN else [])])}"
            )
        stacked = torch.stack([self._found[one] for one in parts])
        return stacked.view(self._num_layers, 2, self._num_heads)

    def _lacks(self, layer: int, part: int) -> bool:
        return (layer, part) not in self._found
