"""Data parallelism that averages after each backward: one all-reduce per parameter, or one for all of a dtype."""

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.common.accounting import set_up
from scratch_ddp.common.agreement import raise_everywhere
from scratch_ddp.common.replicas import broadcast_from_first, named_tensors
from scratch_ddp.common.tensors import bytes_of, flatten, group_alike, unflatten
from scratch_ddp.common.wrapper import Group
from scratch_ddp.ddp.base import ReplicatedModule


class SimpleDistributedDataParallelism(ReplicatedModule):
    """A model whose replicas were verified equal, and whose gradients `sync_gradients()` averages over the ranks.

    Raises ValueError on every rank, naming the first tensor that differs, where a replica is not the first rank's.
    Costs one broadcast per tensor when it is built. Each `sync_gradients()` costs one all-reduce per parameter that has
    a gradient, and one small exchange of which parameters have one. `no_sync()` is in the base class.
    """

    def __init__(self, model: nn.Module, group: Group = None):
        super().__init__(model, group)  # names, shapes, dtypes are the same, or all raise
        problem = None
        for name, mine in named_tensors(model):
            rank0s = bytes_of(mine).clone()  # gloo can't send every dtype
            with set_up():  # not counted as training's traffic
                dist.broadcast(rank0s, group=self.group, group_src=0)
            if problem is None and not torch.equal(bytes_of(mine), rank0s):
                there = rank0s.view(mine.dtype).view(mine.shape)
                apart = (mine.detach().to(torch.complex128) - there.to(torch.complex128)).abs().max().item()
                problem = f"{name!r} differs from rank 0's by {apart:.3g}: set the same seed before building the model"
        raise_everywhere(problem, self.group)  # else equal ranks would wait for ever

    @property
    def model(self) -> nn.Module:
        """The wrapped model, also known as `module`."""
        return self.module

    def sync_gradients(self) -> None:
        """Replace each gradient by its mean over the ranks. Call it after backward, on every rank."""
        if not self.do_sync:
            return
        for parameter in self.parameters_with_gradient():  # the same, in one order, on all ranks
            parameter.grad /= self.world_size  # before the sum: in half precision it may overflow
            dist.all_reduce(parameter.grad, group=self.group)


class FlatDDP(ReplicatedModule):
    """A model that starts as the first rank's on every rank, its gradients averaged in one message per dtype.

    Costs broadcasts of the model when it is built. Each `sync_gradients()` costs one all-reduce per dtype (and device),
    and one small exchange of which parameters have a gradient. While it runs, the gradients are in memory twice;
    afterwards they are views of the one flat tensor.
    """

    def __init__(self, model: nn.Module, group: Group = None):
        super().__init__(model, group)
        broadcast_from_first([each for _, each in named_tensors(model)], self.group)

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
