"""Fully sharded data parallelism (ZeRO-3): parameters, gradients and optimizer state are sharded over the ranks.

To learn the idea, read `scratch_ddp/minimal/fsdp.py`: the same in 150 lines, for a well-behaved model. This folder is
for real models. Read it from the top:

    module           the class FSDP: everything that users call
    runtime          what happens before and after each unit's forward and backward, and the hooks that make it happen
        schedule     in which order a pass gathers and reduces, the same on every rank
        desync       the ranks compare what they are about to do
    units            the sharded model: its units and what else it consists of; how it is made from a plain model
        plan         which parameter belongs to which unit
        meta_init    first values for a model on the meta device
        shards       how parameters are cut into rows; this rank's rows, gathered and freed
        gradients    whole gradients, reduced to this rank's rows of their mean
        comm         all-gather and reduce-scatter, started now and waited for later
        freed_parameter   a parameter that raises when it is read while it has no values
    elementwise      optimizers that can't work on shards
    state_dict       the whole state, or each rank's shards as DTensors
    optimizer_state  an optimizer's state_dict() with DTensors
    checkpoint       saved to a folder with the optimizer's state, and loaded on any number of ranks
"""

from scratch_ddp.fsdp.module import FSDP, ShardedGradScaler

__all__ = ["FSDP", "ShardedGradScaler"]
