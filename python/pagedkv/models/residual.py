"""Decoders that keep the sum of their layers' results apart from what a layer works on, so that
adding and norming are one op: llama.py and gemma.py say what their layers are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

import torch

from pagedkv.models.config import ModelConfig
from pagedkv.models.layers import Embedding, OutputHead, RMSNorm
from pagedkv.models.metadata import AttentionMetadata, LayerCache


class ResidualLayer(Protocol):
    """first_norm: of what the layer gets, applied by whoever adds the layer before."""

    first_norm: RMSNorm

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: LayerCache,
        attn_metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Takes the normed x and the sum so far; returns what is to be added to it next."""
        ...


class AddingLayer(Protocol):
    """A layer that norms and adds inside its products, for some numbers of rows: fewer kernels."""

    def adds(self, num_rows: int) -> bool:
        """Whether it does for so many."""
        ...

    def add_to_(
        self,
        residual: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: LayerCache,
        attn_metadata: AttentionMetadata,
    ) -> None:
        """residual <- residual + what the layer makes of it."""
        ...


class ResidualDecoder:
    """The whole model: hidden states of a step, and logits of chosen ones. derived and base_prefix:
    as CausalLM has them. scale: of the embeddings. adding: the layers again, if they have a form
    that adds by itself.
    """

    def __init__(
        self,
        config: ModelConfig,
        derived: re.Pattern[str],
        *,
        embedding: Embedding,
        scale: float = 1.0,
        layers: Sequence[ResidualLayer],
        adding: Sequence[AddingLayer] = (),
        norm: RMSNorm,
        head: OutputHead,
    ) -> None:
        self.config = config
        self.derived = derived
        self.base_prefix = ""
        self.tied = head.tied
        self.kv_scales: torch.Tensor | None = None
        self._embedding = embedding
        self._scale = scale
        self._layers = layers
        # What norms the sum after each layer: the next layer's first norm, at last the model's.
        self._next_norms = [*(layer.first_norm for layer in layers[1:]), norm]
        self._adding = adding
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
        """Hidden states [num_tokens, hidden_size] of one step.

        Args:
            input_ids, positions: int64 [num_tokens].
            kv_caches: of each layer.

        Mutates:
            kv_caches: the slots of this step's tokens.
        """
        residual = self._embedding(input_ids)
        if self._scale != 1:
            residual = residual * self._scale
        # The layers are alike: what holds for one does for all.
        if self._adding and self._adding[0].adds(len(residual)):
            for one, kv_cache in zip(self._adding, kv_caches, strict=True):
                one.add_to_(residual, positions, kv_cache, attn_metadata)
            return self._norm(residual)
        x = self._layers[0].first_norm(residual)
        for layer, next_norm, kv_cache in zip(
            self._layers, self._next_norms, kv_caches, strict=True
        ):
            x = layer(x, residual, positions, kv_cache, attn_metadata)
            next_norm.add_(x, residual)
        return x

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden_size] -> logits [n, vocab_size]."""
        return self._head(hidden)
