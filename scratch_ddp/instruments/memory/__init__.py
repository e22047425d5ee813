"""Memory of a rank: measured in bytes, followed tensor by tensor, and limited.

`memory_use()` measures what torch allocates inside a block: peak, kept, over time. A `MemoryLedger` lists the tensors
that a rank holds after each part of a step, by name, and what the rank sent. `process_limit()` makes the operating
system refuse this process more than a number of bytes.
"""

from typing import Any

from scratch_ddp.instruments.memory.ledger import Held, MemoryLedger, Moment
from scratch_ddp.instruments.memory.limit import process_limit

__all__ = ["Held", "MemoryLedger", "MemoryUse", "Moment", "memory_use", "process_limit"]


def __getattr__(name: str) -> Any:
    # Imported on first access: from then on torch's allocator reports what it does, and warns about older memory.
    if name in ("MemoryUse", "memory_use"):
        from scratch_ddp.instruments.memory import use

        return getattr(use, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
