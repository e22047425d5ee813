"""`memory_use`: what torch's allocator hands out, exact to the byte, also inside torch's operations."""

import contextlib
import ctypes
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch._C._profiler import _EventType
from torch.profiler import profile
from torch.profiler._utils import traverse_dfs

from scratch_ddp.instruments.timeline.record import recording


@dataclass
class MemoryUse:
    """What was allocated inside `memory_use()`. It is filled when the block ends."""

    peak_bytes: int = 0  # the most held at any time, above what was held at the start of the block
    kept_bytes: int = 0  # held at the end of the block, above what was held at its start; negative if it freed more
    allocated_bytes: int = 0  # all that was allocated, including what was freed again
    over_time: list[tuple[float, int]] = field(default_factory=list)  # (seconds, bytes held above the start)


@contextlib.contextmanager
def memory_use() -> Iterator[MemoryUse]:
    """Measure what torch allocates inside the block: on the current GPU in a process that uses one, else on the CPU.

    Bytes are the requested ones on a CPU, and whole blocks of 512 bytes on a GPU. Allocations of the block's own thread
    are counted; memory of other threads is seen at its next one. Freeing an older tensor counts, unless it is older
    than the import of this module. Raises RuntimeError where torch's profiler is on already.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")
    used = MemoryUse()
    began = time.time_ns()  # the events count from 1970 too
    with contextlib.ExitStack() as stack:
        recorded = stack.enter_context(recording(profile_memory=True))
        first = torch.empty(1, device=device)  # its event tells what is held at the start
        try:
            yield used
        finally:
            last = torch.empty(1, device=device)
            stack.close()
            del first, last
            _fill(used, recorded, device, began)


def _fill(used: MemoryUse, recorded: profile, device: torch.device, began: int) -> None:
    """Read the allocator's events. `began`: the start of the block in nanoseconds since 1970."""
    tree = recorded.profiler.kineto_results.experimental_event_tree()
    events = [event for event in traverse_dfs(tree) if event.tag == _EventType.Allocation]
    events = [event for event in events if event.typed[1].device == device]
    first, *events, last = sorted(events, key=lambda event: event.start_time_ns)
    at_first = first.typed[1].total_allocated
    for event in events:
        size = event.typed[1].alloc_size  # negative where memory is freed
        used.allocated_bytes += max(size, 0)
        held = event.typed[1].total_allocated - at_first
        used.over_time.append(((event.start_time_ns - began) / 1e9, held))
    used.kept_bytes = last.typed[1].total_allocated - last.typed[1].alloc_size - at_first
    used.peak_bytes = max([0, used.kept_bytes, *(held for _, held in used.over_time)])


# Have torch record the size of every CPU allocation, so that freeing it later can be counted. By default it records
# those made under its profiler alone. The setting belongs to torch's C++ library and has no name in Python.
with contextlib.suppress(OSError, ValueError):
    _suffix = "dylib" if sys.platform == "darwin" else "so"
    _library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / f"libc10.{_suffix}"))
    ctypes.c_bool.in_dll(_library, "FLAGS_caffe2_report_cpu_memory_usage").value = True
