"""Model: what the engine needs of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from pagedkv.models import AttentionMetadata, LayerCache


class Model(Protocol):
    """What the engine needs of a model."""

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[LayerCache],
        attn_metadata: AttentionMetadata,
    ) -> torch.Tensor: ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor: ...
