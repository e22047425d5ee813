"""Data parallelism with few messages: after each backward, one all-reduce for all gradients of a dtype."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from scratch_ddp.ddp.base import ReplicatedModule


class FlatDDP(ReplicatedModule):
    """A model that starts as the first rank's on every rank, its gradients averaged in one message a dtype.

    Costs one broadcast a dtype when it is built, and at each `sync_gradients()` one all-reduce a dtype (and device),
    beside one small exchange of which parameters have a gradient. While it runs, the gradients are in memory twice;
    afterwards they are views of the one flat tensor.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | DeviceMesh | None = None):
        super().__init__(model, group)
        self.copy_from_first()

    def sync_gradients(self) -> None:
        """Replace each gradient by its mean over the ranks. Call it after backward, on every rank."""
        if not self.do_sync:
            return
        alike: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for parameter in self.parameters_with_gradient():
            alike.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for parameters in alike.values():
            flat = torch.cat([parameter.grad.reshape(-1) for parameter in parameters])
            flat /= self.world_size  # before the sum, which could overflow in half precision
            dist.all_reduce(flat, group=self.group)
            means = flat.split([parameter.numel() for parameter in parameters])
            for parameter, mean in zip(parameters, means, strict=True):
                parameter.grad = mean.view_as(parameter)
