"""ZeRO: optimizer state, and gradients too, shared out over the ranks that replicate a model."""

from scratch_ddp.zero.optimizer import ShardedOptimizer

__all__ = ["ShardedOptimizer"]
