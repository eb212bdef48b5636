"""Capacity before anything is loaded: what a model takes of a GPU, what fits in the rest, and how
fast it can be at best. As values (make_plan), text and pictures.
"""

from pagedkv.plan.gpus import GPUS, Gpu, find_gpu
from pagedkv.plan.planning import Fit, Plan, make_plan
from pagedkv.plan.report import json_report, text_report

__all__ = [
    "GPUS",
    "Fit",
    "Gpu",
    "Plan",
    "find_gpu",
    "json_report",
    "make_plan",
    "text_report",
]
