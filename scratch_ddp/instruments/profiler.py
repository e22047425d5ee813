"""torch's profiler on this rank, with a clear error where one is on already."""

import contextlib
from collections.abc import Iterator

import torch
from torch.profiler import ProfilerActivity, profile


@contextlib.contextmanager
def recording(**options: bool) -> Iterator[profile]:
    """Record what torch does on this thread (and on the GPU, where one is in use) until the block ends.

    `options` are those of `torch.profiler.profile`. Raises RuntimeError if a profiler is on already.
    """
    if torch.autograd._profiler_enabled():
        raise RuntimeError("torch's profiler is on already, and a thread has only one: end the other block first")
    on_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_initialized() else []
    with profile(activities=[ProfilerActivity.CPU, *on_gpu], **options) as recorded:
        yield recorded
