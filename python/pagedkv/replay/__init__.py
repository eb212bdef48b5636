"""Runs written to a file, and driven again without a model: recorder.py writes, recording.py reads,
driving.py drives.
"""

from pagedkv.replay.checking import first_difference
from pagedkv.replay.recorder import Recorder
from pagedkv.replay.recording import Recording, RecordingError, load

__all__ = ["Recorder", "Recording", "RecordingError", "first_difference", "load"]
