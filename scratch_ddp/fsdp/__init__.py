"""Sharded data parallelism: parameters, gradients and optimizer state shared out over the ranks.

Read `shards` and `gradients` first: what is gathered, used, freed and reduced. `schedule` and `passes` say when,
`hooks` where in the model, `wrapper` holds it together; the rest is what real models need.
"""

from scratch_ddp.fsdp.module import FSDP
from scratch_ddp.fsdp.scaler import ShardedGradScaler

__all__ = ["FSDP", "ShardedGradScaler"]
