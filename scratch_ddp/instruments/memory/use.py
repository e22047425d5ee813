"""What torch's allocator hands out.

The operating system's figure for a process (RSS) is of no use here: it moves by 20 % with what malloc keeps for later.
The allocator's own events are exact to the byte, and include what torch allocates inside its operations.
"""

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

from scratch_ddp.instruments.profiler import recording


@dataclass
class MemoryUse:
    """What was allocated inside `memory_use()`; filled when the block ends."""

    peak_bytes: int = 0  # the most that was held at any moment, above what was held when the block began
    kept_bytes: int = 0  # held when the block ended, above what was held when it began; below 0 if it freed more
    allocated_bytes: int = 0  # all that was handed out, also what was freed again
    allocations: int = 0  # how many times
    over_time: list[tuple[float, int]] = field(default_factory=list)  # (seconds, bytes held above the beginning)


@contextlib.contextmanager
def memory_use(device: torch.device | str | None = None) -> Iterator[MemoryUse]:
    """Measure what torch allocates on `device` inside the block. No communication.

    `device` is "cpu" or a GPU ("cuda:1"); None means the current GPU in a process that uses one, else main memory.
    Bytes are those asked for on a CPU, and whole blocks of 512 bytes on a GPU. Counted is what the thread of the block
    allocates, in Python and in C++; what another thread holds is seen at this thread's next allocation. A tensor that
    is older than the block counts when it is freed, unless it is older than the import of this module.
    Raises RuntimeError where torch's profiler is on already. Costs some microseconds an operation.
    """
    device = _device(device)
    used = MemoryUse()
    began = time.time_ns()
    with contextlib.ExitStack() as stack:
        recorded = stack.enter_context(recording(profile_memory=True))
        first = torch.empty(1, device=device)  # its event says what is held by now
        try:
            yield used
        finally:
            last = torch.empty(1, device=device)
            stack.close()
            del first, last
            _fill(used, recorded, device, began)


def _device(device: torch.device | str | None) -> torch.device:
    """The device that is meant, a GPU with its number."""
    if device is None:
        device = "cuda" if torch.cuda.is_initialized() else "cpu"
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"memory is measured on a CPU or on a CUDA GPU, not on {device.type!r}")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _fill(used: MemoryUse, recorded: profile, device: torch.device, began: int) -> None:
    """Read the allocator's events. `began` in nanoseconds since 1970, as the events have it."""
    tree = recorded.profiler.kineto_results.experimental_event_tree()
    events = [event for event in traverse_dfs(tree) if event.tag == _EventType.Allocation]
    events = [event for event in events if event.typed[1].device == device]
    first, *events, last = sorted(events, key=lambda event: event.start_time_ns)
    at_first = first.typed[1].total_allocated
    for event in events:
        size = event.typed[1].alloc_size  # negative where memory is given back
        used.allocations += size > 0
        used.allocated_bytes += max(size, 0)
        held = event.typed[1].total_allocated - at_first
        used.over_time.append(((event.start_time_ns - began) / 1e9, held))
    used.kept_bytes = last.typed[1].total_allocated - last.typed[1].alloc_size - at_first
    used.peak_bytes = max([0, used.kept_bytes, *(held for _, held in used.over_time)])


def _track_from_now_on() -> None:
    """Have torch note the size of every CPU allocation, so that freeing it later can be counted.

    Otherwise it notes those made under its profiler alone. A setting of its C++ library without a name in Python; a
    build that lacks it works too, and then does not count the freeing of tensors older than the block.
    """
    with contextlib.suppress(OSError, ValueError):
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / f"libc10.{_LIBRARY_SUFFIX}"))
        ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


_LIBRARY_SUFFIX = "dylib" if sys.platform == "darwin" else "so"
_track_from_now_on()
