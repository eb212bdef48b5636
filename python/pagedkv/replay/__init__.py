"""Runs written to a file, and driven again without a model: recorder.py writes, recording.py reads,
driving.py drives, comparing.py says what other settings would have changed.
"""

from pagedkv.replay.checking import first_difference
from pagedkv.replay.comparing import changed_settings, compare, settings_of
from pagedkv.replay.explaining import explain
from pagedkv.replay.recorder import Recorder
from pagedkv.replay.recording import Recording, RecordingError, load
from pagedkv.replay.report import json_report, text_report
from pagedkv.replay.showing import looks

__all__ = [
    "Recorder",
    "Recording",
    "RecordingError",
    "changed_settings",
    "compare",
    "explain",
    "first_difference",
    "json_report",
    "load",
    "looks",
    "settings_of",
    "text_report",
]
