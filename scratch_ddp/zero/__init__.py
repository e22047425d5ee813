"""ZeRO: optimizer state, and gradients too, shared out over the ranks that replicate a model."""

from scratch_ddp.zero.gradients import clip_grad_norm_, reduce_gradients
from scratch_ddp.zero.optimizer import ShardedOptimizer

__all__ = ["ShardedOptimizer", "clip_grad_norm_", "reduce_gradients"]
