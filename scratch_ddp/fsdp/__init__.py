"""Fully sharded data parallelism: parameters, gradients and optimizer state are sharded over the ranks."""

from scratch_ddp.fsdp.module import FSDP, ShardedGradScaler

__all__ = ["FSDP", "ShardedGradScaler"]
