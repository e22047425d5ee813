"""torch's profiler on this rank: one at a time, with a clear error where one is on already, and without log lines."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator

import torch
from torch.profiler import ProfilerActivity, profile


@contextlib.contextmanager
def recording(**options: bool) -> Iterator[profile]:
    """Record what torch does on this thread (and on the GPU, where one is in use) until the block ends.

    `options` are those of `torch.profiler.profile`. The profile can be read once the block has ended, also where it
    ended with an exception. Raises RuntimeError if a profiler is on: torch has one a thread.
    """
    if torch.autograd._profiler_enabled():
        raise RuntimeError("torch's profiler is on already, and a thread has only one: end the other block first")
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_initialized():
        activities.append(ProfilerActivity.CUDA)
    recorded = profile(activities=activities, **options)
    with _without_log_lines():
        recorded.start()
    try:
        yield recorded
    finally:
        with _without_log_lines():
            recorded.stop()


@contextlib.contextmanager
def _without_log_lines() -> Iterator[None]:
    """Keep back the lines ("USDT:…") that the profiler's library writes to file descriptor 2; let others through.

    KINETO_LOG_LEVEL would do it too, but is read once, when torch is loaded.
    """
    sys.stderr.flush()
    with tempfile.TemporaryFile() as caught:
        stderr = os.dup(2)
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            caught.seek(0)
            for line in caught:
                if not line.startswith(b"USDT:"):
                    os.write(2, line)
