"""A real limit on the memory of this process: the operating system refuses what exceeds it.

Linux counts the private memory that a process has reserved (RLIMIT_DATA, VmData). Memory that malloc has reserved and
keeps for later would be a gap in the limit, so it is given back or filled first.
"""

import contextlib
import ctypes
import gc
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

_M_MMAP_THRESHOLD = -3  # from <malloc.h>
_LARGE = 64 * 1024  # inside the block, allocations from this size on get pages of their own (by default from 32 MiB)
_ARENAS = 32  # malloc keeps free memory in several arenas; refused in one, a thread tries the next


@contextlib.contextmanager
def process_limit(nbytes: int) -> Iterator[None]:
    """Let this process allocate at most `nbytes` of main memory beyond what it holds now, until the block ends.

    A tensor that does not fit raises torch.OutOfMemoryError (the error of a full GPU), which names the rank, the size
    and the limit. The process goes on, and after the block the limit is lifted. Memory that is freed inside the block
    may be allocated again. Tensors from 64 KiB on count in whole pages of 4 KiB.

    The limit holds for the whole process: its other threads are refused as well. A rank that is refused alone leaves
    the others waiting in their next collective. Raises ValueError for a limit that is not a positive number of bytes,
    NotImplementedError where the system does not limit a process's memory (Linux does). No communication.
    """
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes <= 0:
        raise ValueError(f"the limit must be a positive whole number of bytes, not {nbytes!r}")
    if not sys.platform.startswith("linux"):
        raise NotImplementedError(f"process_limit needs Linux; {sys.platform} does not limit a process's memory")
    with _no_gaps(), _data_limit(_reserved_bytes() + nbytes):
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
                raise torch.OutOfMemoryError(_refusal(error, nbytes)) from error
            raise


def _refusal(error: Exception, nbytes: int) -> str:
    rank = f"rank {dist.get_rank()}: " if dist.is_initialized() else ""
    asked = str(error).partition("you tried to allocate ")[2].partition(" ")[0]
    wanted = f"a tensor of {int(asked):,} bytes" if asked.isdigit() else "what was asked for"
    return f"{rank}no room for {wanted}: this process may take {nbytes:,} bytes beyond what it had, and no more"


def _reserved_bytes() -> int:
    """What Linux counts against RLIMIT_DATA. (psutil's `data` counts the stack as well.)"""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmData:")[2].split()[0])


@contextlib.contextmanager
def _data_limit(limit: int) -> Iterator[None]:
    """Limit this process to `limit` bytes of private memory; a stricter limit stays as it is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if soft == resource.RLIM_INFINITY else min(limit, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@contextlib.contextmanager
def _no_gaps() -> Iterator[None]:
    """Inside the block malloc keeps nothing large in reserve, and gives pages back as soon as a tensor is freed."""
    torch.ones(2**20).add_(1)  # starts the compute threads now: each reserves memory, which must not be refused
    gc.collect()
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    if glibc := hasattr(library, "malloc_trim"):  # other libraries, such as musl, keep little
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE)
        library.malloc_trim(0)
    filled = _take_holes(library)
    try:
        yield
    finally:
        for block in filled:
            library.free(block)
        if glibc:  # 32 MiB: the highest that glibc sets it to by itself
            library.mallopt(_M_MMAP_THRESHOLD, 32 * 1024 * 1024)


def _take_holes(library: ctypes.CDLL) -> list[int]:
    """Allocate every free block of 64 KiB or more that malloc keeps, the largest first; return the blocks.

    While the process can get no new memory, all that malloc hands out comes from what it kept.
    """
    taken, size, refused = [], 64 * 1024 * 1024, 0
    with _data_limit(4096):  # 0 means no limit to Linux
        while size >= _LARGE:
            if block := library.malloc(size):
                taken.append(block)
            elif (refused := refused + 1) % _ARENAS == 0:
                size //= 2
    return taken
