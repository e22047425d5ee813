"""ZeRO: ranks that replicate a model share its optimizer state among them, and its gradients too."""

from scratch_ddp.zero.optimizer import ShardedOptimizer
from scratch_ddp.zero.reduce import clip_grad_norm_, reduce_gradients

__all__ = ["ShardedOptimizer", "clip_grad_norm_", "reduce_gradients"]
