"""The reference for `my_ddp.py`: one message a step, and one byte a parameter that says whose gradients exist."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class MyDDP(nn.Module):
    """Trains replicas of a model: `.grad` is the mean over all ranks after `sync_gradients()`."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.module, self.world_size = model, dist.get_world_size()
        self.synchronises = True
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), src=0)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.synchronises = self.synchronises, False
        try:
            yield
        finally:
            self.synchronises = before

    def sync_gradients(self) -> None:
        if not self.synchronises:
            return
        present = self.used_on_any_rank()
        if not present:
            return
        flat = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in present])
        flat /= self.world_size  # before the sum, which could overflow in half precision
        dist.all_reduce(flat)
        for parameter, mean in zip(present, flat.split([each.numel() for each in present]), strict=True):
            parameter.grad = mean.view_as(parameter)

    def used_on_any_rank(self) -> list[nn.Parameter]:
        """The parameters that have a gradient on at least one rank: on all ranks the same."""
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        used = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.uint8)
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
        return [parameter for parameter, anywhere in zip(trained, used.tolist(), strict=True) if anywhere]
