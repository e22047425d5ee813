"""How much memory a rank holds: what torch allocates, tensor by tensor or in bytes, and a limit on all of it."""

from typing import Any

from scratch_ddp.instruments.memory.limit import process_limit

__all__ = ["MemoryUse", "memory_use", "process_limit"]


def __getattr__(name: str) -> Any:
    # Not imported before it is asked for: from then on torch's allocator reports what it does, and warns of memory
    # that is older.
    if name in ("MemoryUse", "memory_use"):
        from scratch_ddp.instruments.memory import use

        return getattr(use, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
