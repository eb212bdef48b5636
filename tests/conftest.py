"""What holds for all tests."""

from __future__ import annotations

import signal

# Tests that run in the background of a shell inherit that SIGINT is ignored, and hand it on to the
# programs that they interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
