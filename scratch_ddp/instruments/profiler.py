"""torch's profiler on this rank: without its log lines, and with a clear error where one is on already."""

import contextlib
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator

import torch
from torch.profiler import ProfilerActivity, profile

# A line of the profiler's library, such as "ERROR:2026-01-31 12:00:00 17:17 DeviceProperties.cpp:48] …".
_LOG_LINE = re.compile(rb"(\w+):\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \d+:\d+ \w+\.cpp:\d+\] ")


@contextlib.contextmanager
def recording(**options: bool) -> Iterator[profile]:
    """Record what torch does on this thread (and on the GPU, where one is in use) until the block ends.

    `options` are those of `torch.profiler.profile`. The profile can be read once the block has ended, even by an
    exception. Raises RuntimeError if a profiler is on already: torch allows one per thread.
    """
    if torch.autograd._profiler_enabled():
        raise RuntimeError("torch's profiler is on already, and a thread has only one: end the other block first")
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_initialized():
        activities.append(ProfilerActivity.CUDA)
    recorded = profile(activities=activities, **options)
    with _quietly():
        recorded.start()
    try:
        yield recorded
    finally:
        with _quietly():
            recorded.stop()


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Suppress what the profiler's library logs to file descriptor 2 (KINETO_LOG_LEVEL is read too early for us).

    Its marks ("USDT:…") are always suppressed. Where no GPU is in use, its errors are too: a torch built for GPUs
    reports that it finds none. Anything else written there meanwhile is passed on afterwards.
    """
    sys.stderr.flush()
    with tempfile.TemporaryFile() as caught, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning: Profiler clears events")  # torch 2.11; we record one cycle alone
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
                if not _is_suppressed(line):
                    os.write(2, line)


def _is_suppressed(line: bytes) -> bool:
    logged = _LOG_LINE.match(line)
    return logged is not None and (logged[1] == b"USDT" or not torch.cuda.is_initialized())
