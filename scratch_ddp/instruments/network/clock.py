"""A clock for what is simulated, and sleeping by it: exact, also where the machine is busy, and idle meanwhile.

A thread wakes up later than it asked to: by some hundredths of a millisecond, on a busy machine by milliseconds. That
is the machine's doing, not the link's. So each thread has a clock that is set back by as much as its last sleep was too
long, and what follows is up to that much shorter: over several sleeps the errors don't add up.
"""

import ctypes
import sys
import threading
import time

import torch

from scratch_ddp.instruments.cost.wire import refuse_unless_finite

_WAKING = 12e-6  # seconds that a thread at least takes to wake up
_WATCH = 60e-6  # seconds before the moment, from which on it is watched for: waking may take longer
_WATCH_SHARE = 0.04  # of the wait, so that short waits are not spent watching
_MADE_UP_FOR = 0.02  # seconds, at most: who was stopped for a while is not to rush afterwards
_SET_TIMER_SLACK = 29  # of Linux, see prctl(2)


class _Thread(threading.local):
    """How late a thread is. Linux wakes threads up to 50 µs late, to wake several at once; here it must not."""

    def __init__(self) -> None:
        self.late = 0.0
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1, 0, 0, 0)


_thread = _Thread()


def now() -> float:
    """This thread's clock: seconds of time.monotonic, less those by which its last sleep was too long."""
    return time.monotonic() - _thread.late


def sleep_until(moment: float) -> None:
    """Return when this thread's clock shows `moment`, or at once if it has passed.

    In the main thread a signal whose handler raises, as Stop does, ends the sleep.
    """
    if moment <= now():
        return
    left = moment - time.monotonic()
    if left > 0:
        time.sleep(max(0.0, left - _WAKING - min(_WATCH, _WATCH_SHARE * left)))
    while (late := time.monotonic() - moment) < 0:
        pass  # no yielding: on a busy machine that costs the processor for milliseconds
    _thread.late = min(late, _MADE_UP_FOR)


# FOLDED: A simulated processor beside the simulated link: what it computes is real, how long it takes is said.


def take_time(tensor: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
    """Return the tensor `forward` seconds later; in backward its gradient is handed on `backward` seconds later.

    Around a layer's output it makes the layer take that long (beside its own computing), on any machine, and leaves the
    processor to others meanwhile: `take_time(layer(x), 5e-3, 10e-3)`. Values and gradients are not changed. In backward
    the time passes before the layer's own gradients are computed. Time is that of the link's clock (see `sleep`): what
    one sleep was too long, the next is shorter. Raises ValueError for a time that is negative, infinite or NaN.
    """
    refuse_unless_finite(forward=forward, backward=backward)
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
