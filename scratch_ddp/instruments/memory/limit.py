"""A real limit on the private memory that this process has reserved (RLIMIT_DATA, VmData): Linux refuses more."""

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


@contextlib.contextmanager
def process_limit(nbytes: int) -> Iterator[None]:
    """Let this process allocate at most `nbytes` of main memory beyond what it holds now, until the block ends.

    A tensor that does not fit raises torch.OutOfMemoryError, which names the rank, the size and the limit. Memory that
    is freed inside the block may be allocated again. A rank that is refused alone leaves the others waiting in their
    next collective. Raises NotImplementedError elsewhere than on Linux.
    """
    if not sys.platform.startswith("linux"):
        raise NotImplementedError(f"process_limit needs Linux; {sys.platform} does not limit a process's memory")
    torch.ones(2**20).add_(1)  # starts the compute threads now: each reserves memory, which must not be refused
    gc.collect()
    library = ctypes.CDLL(None)  # glibc, which torch is built for
    library.mallopt(_M_MMAP_THRESHOLD, 64 * 1024)  # tensors from 64 KiB on get pages of their own
    library.malloc_trim(0)
    held = _hold_free_blocks(library)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_reserved_bytes() + nbytes, hard))
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            raise torch.OutOfMemoryError(_refusal(error, nbytes)) from error
        raise
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        for block in held:
            library.free(ctypes.c_void_p(block))
        library.mallopt(_M_MMAP_THRESHOLD, 32 * 1024 * 1024)  # the highest that glibc sets it to by itself


def _hold_free_blocks(library: ctypes.CDLL) -> list[int]:
    """Take what malloc kept of tensors that were freed before: it would be handed out again without asking the system.

    Returns the addresses of the blocks. They are not touched, so they take no memory.
    """
    library.malloc.restype = ctypes.c_void_p
    held = []
    for size in (2**20, 2**16):
        while True:
            before = _reserved_bytes()
            block = library.malloc(ctypes.c_size_t(size))
            if _reserved_bytes() > before:  # a new one
                library.free(ctypes.c_void_p(block))
                break
            held.append(block)
    return held


def _refusal(error: Exception, nbytes: int) -> str:
    rank = f"rank {dist.get_rank()}: " if dist.is_initialized() else ""
    asked = str(error).partition("you tried to allocate ")[2].partition(" ")[0]
    wanted = f"a tensor of {int(asked):,} bytes" if asked.isdigit() else "what was asked for"
    return f"{rank}no room for {wanted}: this process may take {nbytes:,} bytes beyond what it had, and no more"


def _reserved_bytes() -> int:
    """What Linux counts against RLIMIT_DATA. (psutil's `data` counts the stack as well.)"""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmData:")[2].split()[0])
