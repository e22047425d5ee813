"""SIGTERM, with which schedulers and torchrun end a job: the run saves a checkpoint and leaves."""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType


class StopRequest:
    """Whether this process was asked to stop. The step under way goes on to its end."""

    def __init__(self) -> None:
        self.asked = False

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


class Stopped(Exception):
    """A run that has left early, after `steps` steps, all of which are in its last checkpoint."""

    def __init__(self, steps: int):
        self.steps = steps
        super().__init__(f"stopped by SIGTERM after step {steps}, saved; the same command goes on from there")


@contextlib.contextmanager
def stop_on_sigterm() -> Iterator[StopRequest]:
    """Note SIGTERM inside the block instead of ending at once. For the main thread."""
    request = StopRequest()
    before = signal.signal(signal.SIGTERM, request._ask)
    try:
        yield request
    finally:
        signal.signal(signal.SIGTERM, before)


def exit_status() -> int:
    """The status with which a stopped run ends: 0 under torchrun, which would otherwise start it again; else 143."""
    return 0 if "TORCHELASTIC_RUN_ID" in os.environ else 128 + signal.SIGTERM
