"""What torch's allocator hands out, and a real limit on what this process may take."""

from scratch_ddp.instruments.memory.limit import process_limit
from scratch_ddp.instruments.memory.use import MemoryUse, memory_use

__all__ = ["MemoryUse", "memory_use", "process_limit"]
