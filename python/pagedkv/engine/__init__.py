"""The engine: requests in, steps run, text out. `LLM` for lists of prompts, `Engine` for one step
at a time.
"""

from pagedkv.engine.engine import CacheView, Engine
from pagedkv.engine.llm import LLM

__all__ = ["LLM", "CacheView", "Engine"]
