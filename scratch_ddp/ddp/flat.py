"""Data parallelism with few messages: after each backward, one all-reduce for all gradients of a dtype."""

import torch.distributed as dist
from torch import nn

from scratch_ddp.common.tensors import flatten, group_alike, unflatten
from scratch_ddp.common.wrapper import Group
from scratch_ddp.ddp.base import ReplicatedModule


class FlatDDP(ReplicatedModule):
    """A model that starts as the first rank's on every rank, its gradients averaged in one message per dtype.

    Costs one broadcast per dtype when it is built. Each `sync_gradients()` costs one all-reduce per dtype (and device),
    and one small exchange of which parameters have a gradient. While it runs, the gradients are in memory twice;
    afterwards they are views of the one flat tensor.
    """

    def __init__(self, model: nn.Module, group: Group = None):
        super().__init__(model, group)
        self.copy_from_first()

    def sync_gradients(self) -> None:
        """Replace each gradient by its mean over the ranks. Call it after backward, on every rank."""
        if not self.do_sync:
            return
        for parameters in group_alike(self.parameters_with_gradient()):
            flat = flatten([parameter.grad for parameter in parameters])
            flat /= self.world_size  # before the sum, which could overflow in half precision
            dist.all_reduce(flat, group=self.group)
            for parameter, mean in zip(parameters, unflatten(flat, parameters), strict=True):
                parameter.grad = mean
