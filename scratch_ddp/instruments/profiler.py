"""torch's profiler on this rank, with a clear error where one is on already."""

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch.profiler import ProfilerActivity, profile


@contextlib.contextmanager
def recording(**options: bool) -> Iterator[profile]:
    """Record what torch does on this thread (and on the GPU, where one is in use) until the block ends.

    `options` are those of `torch.profiler.profile`. The profile can be read once the block has ended, even by an
    exception. Raises RuntimeError if a profiler is on already: torch allows one per thread. The profiler's library
    writes two lines to stderr per block, unless scratch_ddp was imported before torch.
    """
    if torch.autograd._profiler_enabled():
        raise RuntimeError("torch's profiler is on already, and a thread has only one: end the other block first")
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_initialized():
        activities.append(ProfilerActivity.CUDA)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning: Profiler clears events")  # torch 2.11; we record one cycle alone
        recorded = profile(activities=activities, **options)
        recorded.start()
    try:
        yield recorded
    finally:
        recorded.stop()
