"""Choosing tokens from logits: what requests want of it, by slot and by row, as operands of the op
that chooses; log-probabilities of what was chosen."""

from pagedkv.ops.philox import philox4x32, uniform
from pagedkv.sampling.edit_lists import EditLists
from pagedkv.sampling.edits import EditTensors, RuledRow, call_functions
from pagedkv.sampling.logit_rules import LogitRules
from pagedkv.sampling.logprobs import TokenScores, best_candidates, chosen_logprobs, score_tokens
from pagedkv.sampling.params import SlotParams
from pagedkv.sampling.sampler import RowTensors, choose

__all__ = [
    "EditLists",
    "EditTensors",
    "LogitRules",
    "RowTensors",
    "RuledRow",
    "SlotParams",
    "TokenScores",
    "best_candidates",
    "call_functions",
    "choose",
    "chosen_logprobs",
    "philox4x32",
    "score_tokens",
    "uniform",
]
