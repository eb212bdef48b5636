"""Self-attention over the paged cache: projections, norms of queries and keys, rotary embedding,
cache write, attention.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagedkv import ops
from pagedkv.models.config import ModelConfig
from pagedkv.models.layers import RMSNorm, projection
from pagedkv.models.linear import norms_inside
from pagedkv.models.metadata import AttentionMetadata, LayerCache
from pagedkv.models.parameters import Parameters, Piece, Split, fused


class AttentionWeights(NamedTuple):
    """Names and shapes of an attention's projections in a checkpoint."""

    qkv: tuple[Piece, ...]
    output: Piece

    @staticmethod
    def of(name: str, config: ModelConfig) -> AttentionWeights:
        """Those of Llama, whose layers most architectures share."""
        hidden, dim = config.hidden_size, config.head_dim
        query_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
        qkv: tuple[Piece, ...] = (
            Piece(f"{name}.q_proj", (query_size, hidden), Split.COLUMN, unit=dim),
            Piece(f"{name}.k_proj", (kv_size, hidden), Split.KV_HEADS, unit=dim),
            Piece(f"{name}.v_proj", (kv_size, hidden), Split.KV_HEADS, unit=dim),
        )
        if config.fused_weights:
            qkv = fused(qkv, f"{name}.qkv_proj")
        return AttentionWeights(
            qkv, Piece(f"{name}.o_proj", (hidden, query_size), Split.ROW, unit=dim)
        )


class Attention:
    """Grouped-query attention; query head h reads KV head h // (num_heads / num_kv_heads).

    cos_sin_table: fp32 [max_model_len, rotary_dim], shared by all layers; None: no rotation.
    window: how many tokens a token sees, itself included; 0: all before it. norms: of queries and
    of keys, head by head, before they are rotated: there is a table then, and they have the same
    epsilon. folded_norm: the norm before, if it is to be folded into the first product: there is a
    table then, and add_to_ alone, for any number of rows.
    """

    __slots__ = (
        "_alibi_slopes",
        "_clip",
        "_folds",
        "_heads",
        "_norms",
        "_output",
        "_qkv",
        "_scale",
        "_shape",
        "_soft_cap",
        "_table",
        "_window",
    )

    def __init__(
        self,
        parameters: Parameters,
        weights: AttentionWeights,
        config: ModelConfig,
        cos_sin_table: torch.Tensor | None,
        window: int,
        norms: tuple[RMSNorm, RMSNorm] | None = None,
        folded_norm: RMSNorm | None = None,
    ) -> None:
        self._folds = folded_norm is not None
        self._table = cos_sin_table
        self._window = window
        self._scale = config.attention_scale or config.head_dim**-0.5
        self._soft_cap = config.attention_soft_cap
        self._clip = config.clip_qkv
        self._alibi_slopes: torch.Tensor | None = None
        if config.alibi_slopes:
            self._alibi_slopes = torch.tensor(config.alibi_slopes, device=parameters.device)
        self._heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self._shape = (-1, sum(self._heads), config.head_dim)
        self._norms = norms
        self._qkv = projection(
            parameters, weights.qkv, has_bias=config.attention_bias, folded_norm=folded_norm
        )
        self._output = projection(parameters, (weights.output,), has_bias=config.output_bias)

    def __call__(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: LayerCache,
        attn_metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> the same shape. Mutates kv_cache: this step's slots."""
        return self._output(self._attend(self._qkv(x), positions, kv_cache, attn_metadata))

    def adds(self, num_rows: int) -> bool:
        """Whether add_to_ may be called for so many rows."""
        return self._folds or (self._qkv.streams(num_rows) and self._output.streams(num_rows))

    def add_to_(
        self,
        residual: torch.Tensor,
        norm: RMSNorm,
        positions: torch.Tensor,
        kv_cache: LayerCache,
        attn_metadata: AttentionMetadata,
    ) -> None:
        """residual [num_tokens, hidden_size] <- residual + self(norm(residual)). REQUIRES adds.
        Mutates kv_cache too.
        """
        num_rows, hidden_size = residual.shape
        bare: tuple[torch.Tensor | None, float] = (None, 0.0)
        if self._folds and not (
            self._qkv.streams(num_rows) and norms_inside(num_rows, hidden_size)
        ):
            qkv, bare = self._qkv(residual), (residual, norm.norm.epsilon)
        else:
            qkv = residual.new_empty(num_rows, self._shape[1] * self._shape[2])
            self._qkv.stream_(qkv, residual, norm.norm)
        out = self._attend(qkv, positions, kv_cache, attn_metadata, bare)
        self._output.add_to_(residual, out)

    def _attend(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: LayerCache,
        attn_metadata: AttentionMetadata,
        bare: tuple[torch.Tensor | None, float] = (None, 0.0),
    ) -> torch.Tensor:
        """From all projections of the tokens to all heads' results, heads side by side. bare: the
        rows whose scales the projections lack, if they do, and their epsilon.
        """
        residual, residual_epsilon = bare
        if self._clip:
            qkv.clamp_(-self._clip, self._clip)
        query, key, value = torch.split(qkv.view(self._shape), self._heads, 1)
        key_cache, value_cache, k_scale, v_scale = kv_cache
        slots = attn_metadata.slot_mapping
        if self._table is None:
            ops.reshape_and_cache(
                key, value, key_cache, value_cache, slots, k_scale=k_scale, v_scale=v_scale
            )
        elif self._norms is None:
            ops.fused_rotary_reshape_and_cache(
                positions,
                query,
                key,
                value,
                self._table,
                key_cache,
                value_cache,
                slots,
                residual=residual,
                residual_epsilon=residual_epsilon,
                bias=self._qkv.late_bias,
                k_scale=k_scale,
                v_scale=v_scale,
            )
        else:
            (query_norm, epsilon), (key_norm, _) = (norm.norm for norm in self._norms)
            ops.fused_norm_rotary_reshape_and_cache(
                positions,
                query,
                key,
                value,
                query_norm,
                key_norm,
                epsilon,
                self._table,
                key_cache,
                value_cache,
                slots,
                residual=residual,
                residual_epsilon=residual_epsilon,
                bias=self._qkv.late_bias,
                k_scale=k_scale,
                v_scale=v_scale,
            )
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        ops.paged_attention(
            out,
            None,
            query,
            key_cache,
            value_cache,
            attn_metadata.block_tables,
            attn_metadata.seq_lens,
            attn_metadata.query_start_loc,
            max_query_len=attn_metadata.max_query_len,
            scale=self._scale,
            window=self._window,
            alibi_slopes=self._alibi_slopes,
            soft_cap=self._soft_cap,
            k_scale=k_scale,
            v_scale=v_scale,
            prefix_groups=attn_metadata.prefix_groups,
            workspace=attn_metadata.workspace,
        )
        return out.flatten(1)
