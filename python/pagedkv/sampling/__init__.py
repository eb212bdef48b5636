"""Choosing tokens from logits: Philox draws, temperature, top-k, top-p, per row of one batch."""

from pagedkv.sampling.params import SlotParams
from pagedkv.sampling.philox import philox4x32, uniform
from pagedkv.sampling.sampler import best_candidates, chosen_logprobs, sample

__all__ = ["SlotParams", "best_candidates", "chosen_logprobs", "philox4x32", "sample", "uniform"]
