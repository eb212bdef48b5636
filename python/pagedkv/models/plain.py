"""Decoders whose layers are x + attention(norm(x)), then x + mlp(norm(x)), with layer norms and no
gate: gpt2.py and mpt.py read their configurations and say what their tensors are called.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch

from pagedkv.models.attention import Attention
from pagedkv.models.config import ModelConfig
from pagedkv.models.layers import MLP, Embedding, LayerNorm, OutputHead
from pagedkv.models.metadata import AttentionMetadata, LayerCache


class PlainLayer(NamedTuple):
    """x <- x + attention(norm(x)); x <- x + mlp(norm(x))."""

    attention_norm: LayerNorm
    attention: Attention
    mlp_norm: LayerNorm
    mlp: MLP

    def __call__(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: LayerCache,
        attn_metadata: AttentionMetadata,
    ) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), positions, kv_cache, attn_metadata)
        return x + self.mlp(self.mlp_norm(x))


class PlainDecoder:
    """The whole model: hidden states of a step, and logits of chosen ones. derived and base_prefix:
    as CausalLM has them. positions: the table of learned ones, if there is one.
    """

    def __init__(
        self,
        config: ModelConfig,
        derived: re.Pattern[str],
        base_prefix: str,
        *,
        embedding: Embedding,
        positions: Embedding | None,
        layers: list[PlainLayer],
        norm: LayerNorm,
        head: OutputHead,
    ) -> None:
        self.config = config
        self.derived = derived
        self.base_prefix = base_prefix
        self.tied = head.tied
        self.kv_scales: torch.Tensor | None = None
        self._embedding = embedding
        self._positions = positions
        self._layers = layers
        self._norm = norm
        self._head = head

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[LayerCache],
        attn_metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size] of one step; arguments as ResidualDecoder's."""
        x = self._embedding(input_ids)
        if self._positions is not None:
            x = x + self._positions(positions)
        for layer, kv_cache in zip(self._layers, kv_caches, strict=True):
            x = layer(x, positions, kv_cache, attn_metadata)
        return self._norm(x)

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden_size] -> logits [n, vocab_size]."""
        return self._head(hidden)
