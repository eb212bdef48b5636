"""Load on an OpenAI-compatible server, and what it made of it: `pagedkv bench serve` and the
benchmarks use it. Needs httpx; imports no torch, and knows nothing of pagedkv's own server.
"""

from pagedkv.cli.load.arrivals import arrival_times
from pagedkv.cli.load.client import Outcome, Target
from pagedkv.cli.load.prompts import LoadPrompt, random_prompts, read_prompts
from pagedkv.cli.load.running import first_model, run_load
from pagedkv.cli.load.summary import Goals, LoadSummary, Spread, summarise

__all__ = [
    "Goals",
    "LoadPrompt",
    "LoadSummary",
    "Outcome",
    "Spread",
    "Target",
    "arrival_times",
    "first_model",
    "random_prompts",
    "read_prompts",
    "run_load",
    "summarise",
]
