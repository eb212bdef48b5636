"""Decides what the next step computes: admission, chunked prefill beside decodes, preemption, ends.
Never sees a tensor or a text.
"""

from pagedkv.scheduler.building import build_scheduler
from pagedkv.scheduler.cost_model import Rates
from pagedkv.scheduler.run_view import RunView
from pagedkv.scheduler.scheduler import Scheduler
from pagedkv.scheduler.slots import SlotTable

__all__ = ["Rates", "RunView", "Scheduler", "SlotTable", "build_scheduler"]
