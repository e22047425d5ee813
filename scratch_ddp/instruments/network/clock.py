"""The clock of the simulation, and sleeping by it: exact even on a busy machine, and without processor time.

A thread wakes up later than it asked to. So each thread has a clock that is set back by as much as its last sleep was
too long. Over several sleeps the errors don't add up.
"""

import ctypes
import sys
import threading
import time

import torch

_WAKING = 12e-6  # seconds that a thread takes at least to wake up
_SPIN = 60e-6  # seconds to spin before the end of a wait, since waking may take longer
_SPIN_SHARE = 0.04  # of a wait at most, so that short waits don't spin all the time
_MOST_LATE = 0.02  # seconds that are made up for at most: a process that was stopped for a while shall not rush
_SET_TIMER_SLACK = 29  # of Linux, see prctl(2)


class _Thread(threading.local):
    """How late this thread is. Linux wakes threads up to 50 µs late to wake several at once; this turns that off."""

    def __init__(self) -> None:
        self.late = 0.0
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1, 0, 0, 0)


_thread = _Thread()


def now() -> float:
    """This thread's clock: seconds of time.monotonic, minus the seconds by which its last sleep was too long."""
    return time.monotonic() - _thread.late


def sleep_until(moment: float) -> None:
    """Return when this thread's clock shows `moment`. A signal whose handler raises (as Stop does) ends the sleep."""
    if moment <= now():
        return
    left = moment - time.monotonic()
    if left > 0:
        time.sleep(max(0.0, left - _WAKING - min(_SPIN, _SPIN_SHARE * left)))
    while (late := time.monotonic() - moment) < 0:
        pass  # without yielding: on a busy machine the thread would lose the processor for milliseconds
    _thread.late = min(late, _MOST_LATE)


def take_time(tensor: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
    """Return the tensor `forward` seconds later; in backward, pass its gradient on `backward` seconds later.

    `take_time(layer(x), 5e-3, 10e-3)` makes a layer take so much longer. Values and gradients don't change.
    """
    return _TakesTime.apply(tensor, forward, backward)


class _TakesTime(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.seconds = backward
        sleep_until(now() + forward)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        sleep_until(now() + ctx.seconds)
        return gradient, None, None
