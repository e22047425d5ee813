"""Sleep until a moment, to a few hundredths of a millisecond, and use next to no processor time meanwhile."""

import ctypes
import sys
import threading
import time

_WAKING = 12e-6  # seconds that a thread at least takes to wake up
_WATCH = 60e-6  # seconds before the moment, from which on it is watched for: waking may take longer
_WATCH_SHARE = 0.04  # of the wait, so that short waits are not spent watching
_SET_TIMER_SLACK = 29  # of Linux, see prctl(2)


def sleep_until(moment: float) -> None:
    """Return at `moment` (in seconds of time.monotonic), or at once if it has passed.

    In the main thread a signal whose handler raises, as Stop does, ends the sleep.
    """
    left = moment - time.monotonic()
    if left <= 0:
        return
    _thread.wakes_at_once  # noqa: B018  sets this thread up the first time
    time.sleep(max(0.0, left - _WAKING - min(_WATCH, _WATCH_SHARE * left)))
    while time.monotonic() < moment:
        pass  # no yielding: on a busy machine that costs the processor for milliseconds


class _Thread(threading.local):
    """Linux wakes a thread up to 50 µs late, to wake several at once. Threads that have slept here are not let wait."""

    def __init__(self) -> None:
        self.wakes_at_once = sys.platform == "linux" and ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1, 0, 0, 0) == 0


_thread = _Thread()
