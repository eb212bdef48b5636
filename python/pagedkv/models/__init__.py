"""Models: forward passes of known architectures over the paged cache, and their loading.

A model takes tensors and gives tensors; it never sees a request. Checkpoint files are opened by
pagedkv.weights.
"""

from pagedkv.models.config import ModelConfig
from pagedkv.models.loading import count_weights, load_model, random_model, shape_model
from pagedkv.models.metadata import AttentionMetadata, LayerCache
from pagedkv.models.registry import FAMILIES, CausalLM

__all__ = [
    "FAMILIES",
    "AttentionMetadata",
    "CausalLM",
    "LayerCache",
    "ModelConfig",
    "count_weights",
    "load_model",
    "random_model",
    "shape_model",
]
