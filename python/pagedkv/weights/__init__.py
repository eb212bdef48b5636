"""Checkpoints: safetensors directories, GGUF files and short names, opened into one shape.

Never pickle, never code from a model's folder. What the tensors mean is the models' business.
"""

from pagedkv.weights.checkpoint import Checkpoint
from pagedkv.weights.fetching import ALIASES, cache_dir, fetch
from pagedkv.weights.opening import open_checkpoint, read_config
from pagedkv.weights.safetensors_directory import read_json

__all__ = [
    "ALIASES",
    "Checkpoint",
    "cache_dir",
    "fetch",
    "open_checkpoint",
    "read_config",
    "read_json",
]
