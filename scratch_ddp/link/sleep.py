"""Sleep until a moment, to a few hundredths of a millisecond, and use next to no processor time meanwhile."""

import ctypes
import sys
import time
from collections.abc import Callable

_WAKING = 12e-6  # seconds that a thread at least takes to wake up
_WATCH = 40e-6  # seconds before the moment, from which on it is watched for: waking may take longer
_WATCH_SHARE = 0.04  # of the wait, so that short waits are not spent watching
_SET_TIMER_SLACK, _GET_TIMER_SLACK = 29, 30  # of Linux, see prctl(2)


def _without_slack(sleep: Callable[[float], None]) -> Callable[[float], None]:
    """Linux wakes a thread up to 50 µs late, to wake several at once; while this one sleeps, it does not."""
    if sys.platform != "linux":
        return sleep
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = [ctypes.c_int] + 4 * [ctypes.c_ulong]

    def sleep_without_slack(seconds: float) -> None:
        slack = prctl(_GET_TIMER_SLACK, 0, 0, 0, 0)
        prctl(_SET_TIMER_SLACK, 1, 0, 0, 0)
        try:
            sleep(seconds)
        finally:
            prctl(_SET_TIMER_SLACK, max(slack, 1), 0, 0, 0)

    return sleep_without_slack


_sleep = _without_slack(time.sleep)


def sleep_until(moment: float) -> None:
    """Return at `moment` (in seconds of time.monotonic), or at once if it has passed.

    In the main thread a signal whose handler raises, as Stop does, ends the sleep.
    """
    left = moment - time.monotonic()
    if left <= 0:
        return
    _sleep(max(0.0, left - _WAKING - min(_WATCH, _WATCH_SHARE * left)))
    while time.monotonic() < moment:
        pass
