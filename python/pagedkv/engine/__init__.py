"""The engine: requests in, steps run, text out. `LLM` for lists of prompts, `Engine` for one step
at a time, `AsyncEngine` for an event loop.
"""

from pagedkv.engine.async_engine import AsyncEngine, Submission
from pagedkv.engine.engine import CacheView, Engine
from pagedkv.engine.llm import LLM
from pagedkv.engine.run_metrics import MetricsSnapshot, RunMetrics
from pagedkv.engine.stream import EngineDead, Stream

__all__ = [
    "LLM",
    "AsyncEngine",
    "CacheView",
    "Engine",
    "EngineDead",
    "MetricsSnapshot",
    "RunMetrics",
    "Stream",
    "Submission",
]
