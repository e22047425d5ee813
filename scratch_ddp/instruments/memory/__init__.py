"""Memory of a rank: followed tensor by tensor, limited, and measured in bytes.

`use.memory_use()` stands apart, since from its import on torch's allocator reports what it does.
"""

from scratch_ddp.instruments.memory.ledger import Held, MemoryLedger, Moment
from scratch_ddp.instruments.memory.limit import process_limit

__all__ = ["Held", "MemoryLedger", "Moment", "process_limit"]
