"""Memory of a rank: measured in bytes, followed tensor by tensor, and limited.

`use.memory_use()` measures what torch allocates inside a block. A `MemoryLedger` lists the tensors that a rank holds
after each part of a step, by name, and what it sent. `process_limit()` has the operating system refuse more than a
number of bytes. (Import `use` early: from then on torch's allocator reports what it does.)
"""

from scratch_ddp.instruments.memory.ledger import Held, MemoryLedger, Moment
from scratch_ddp.instruments.memory.limit import process_limit

__all__ = ["Held", "MemoryLedger", "Moment", "process_limit"]
