"""Choosing tokens from logits: Philox draws, temperature, top-k, top-p, per row of one batch."""

from pagedkv.sampling.logit_processing import RuledRow, process_logits
from pagedkv.sampling.logit_rules import LogitRules
from pagedkv.sampling.logprobs import TokenScores, score_tokens
from pagedkv.sampling.params import SlotParams
from pagedkv.sampling.philox import philox4x32, uniform
from pagedkv.sampling.sampler import best_candidates, chosen_logprobs, sample
from pagedkv.sampling.tensor_sampler import Kinds, RowTensors, choose

__all__ = [
    "Kinds",
    "LogitRules",
    "RowTensors",
    "RuledRow",
    "SlotParams",
    "TokenScores",
    "best_candidates",
    "choose",
    "chosen_logprobs",
    "philox4x32",
    "process_logits",
    "sample",
    "score_tokens",
    "uniform",
]
