"""Data-parallel training in four ways. Every rank holds the whole model and computes gradients from its own batch;
then all ranks need the mean of these gradients, and the four ways differ only in how it travels:

    SimpleDistributedDataParallelism   after backward, one all-reduce per parameter
    FlatDDP                            after backward, one all-reduce for all parameters
    OverlappedDDP                      during backward, one all-reduce per parameter
    BucketedDDP                        during backward, one all-reduce per bucket of parameters

One loop serves them all:

    model = BucketedDDP(model)
    for batch in loader:
        loss = model(batch)
        loss.backward()
        model.sync_gradients()     # .grad is now the mean over all ranks
        optimizer.step()
        optimizer.zero_grad()

They expect a well-behaved model: dense gradients of one dtype, every parameter used in every backward, in the same
order on every rank, and one backward per `sync_gradients()` (others under `no_sync()`).
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class DataParallel(nn.Module):
    """What the four have in common: the wrapped model, the ranks that share the work, and a switch."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None = None):
        super().__init__()
        self.module, self.group = model, group
        self.world_size = dist.get_world_size(group)
        self.do_sync = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def sync_gradients(self) -> None:
        raise NotImplementedError

    def enable_grad_sync(self) -> None:
        self.do_sync = True

    def disable_grad_sync(self) -> None:
        self.do_sync = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication. Forward, backward and `sync_gradients` stand inside."""
        before = self.do_sync
        self.disable_grad_sync()
        try:
            yield
        finally:  # after an exception too
            self.do_sync = before

    def copy_from_rank_0(self) -> None:
        """Start all replicas with the same values. One broadcast per parameter and buffer."""
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            dist.broadcast(tensor.detach(), group=self.group, group_src=0)

    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]


class SimpleDistributedDataParallelism(DataParallel):
    """Verifies that all replicas are equal, then averages one gradient after the other."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None = None):
        super().__init__(model, group)
        different = None
        for name, mine in model.named_parameters():
            rank0s = mine.detach().clone()
            dist.broadcast(rank0s, group=group, group_src=0)
            if different is None and not torch.equal(mine, rank0s):
                different = name
        # A rank that raised alone would leave the others waiting in their next collective. So all ranks hear of it.
        found = [None] * self.world_size
        dist.all_gather_object(found, different, group=group)
        if any(found):
            ranks = {rank: name for rank, name in enumerate(found) if name}
            raise ValueError(f"not equal to rank 0's, by rank: {ranks}; set the same seed before building the model")

    def sync_gradients(self) -> None:
        """Replace each gradient by its mean. One all-reduce per parameter."""
        if not self.do_sync:
            return
        for parameter in self.trained():
            parameter.grad /= self.world_size  # before the sum: in half precision it could overflow
            dist.all_reduce(parameter.grad, group=self.group)


class FlatDDP(DataParallel):
    """One message instead of many: the gradients are copied into one tensor, which is averaged."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None = None):
        super().__init__(model, group)
        self.copy_from_rank_0()

    def sync_gradients(self) -> None:
        """Replace each gradient by its mean. One all-reduce."""
        if not self.do_sync:
            return
        parameters = self.trained()
        flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
        flat /= self.world_size
        dist.all_reduce(flat, group=self.group)
        for parameter, mean in zip(parameters, flat.split([each.numel() for each in parameters]), strict=True):
            parameter.grad = mean.view_as(parameter)


class OverlappedDDP(DataParallel):
    """Sends each gradient as soon as it is there, while backward computes the next."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None = None):
        super().__init__(model, group)
        self.copy_from_rank_0()
        self.under_way: list[dist.Work] = []
        for parameter in self.trained():
            parameter.register_post_accumulate_grad_hook(self.gradient_is_ready)

    def gradient_is_ready(self, parameter: nn.Parameter) -> None:
        """Called by autograd. Starts an all-reduce and does not wait for it."""
        if self.do_sync:
            parameter.grad /= self.world_size
            self.under_way.append(dist.all_reduce(parameter.grad, group=self.group, async_op=True))

    def sync_gradients(self) -> None:
        """Wait for what backward has started."""
        for work in self.under_way:
            work.wait()
        self.under_way.clear()


class Bucket:
    """Some parameters' gradients, one after the other in one tensor that is there for good."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.missing = set(parameters)  # whose gradients have not arrived in this step
        sizes = [each.numel() for each in parameters]
        self.flat = parameters[0].new_zeros(sum(sizes))
        parts = self.flat.split(sizes)
        self.views = {each: part.view_as(each) for each, part in zip(parameters, parts, strict=True)}


class BucketedDDP(DataParallel):
    """Few messages that still start during backward: gradients travel in buckets of `bucket_mb` · 2²⁰ bytes.

    Buckets hold the parameters in reverse order, which is about the order in which backward reaches them. The first
    one is small, so that something is on the wire early.
    """

    def __init__(self, model: nn.Module, bucket_mb: float = 25.0, group: dist.ProcessGroup | None = None):
        super().__init__(model, group)
        self.copy_from_rank_0()
        self.buckets = [Bucket(parameters) for parameters in self.share_out(bucket_mb)]
        self.under_way: list[dist.Work] = []
        for bucket in self.buckets:
            for parameter in bucket.views:
                parameter.register_post_accumulate_grad_hook(lambda each, its=bucket: self.gradient_is_ready(its, each))

    def share_out(self, bucket_mb: float, first_mb: float = 1.0) -> list[list[nn.Parameter]]:
        """Fill one bucket after the other; the parameter that reaches the limit is the bucket's last."""
        buckets: list[list[nn.Parameter]] = [[]]
        for parameter in reversed(self.trained()):
            buckets[-1].append(parameter)
            limit = bucket_mb if len(buckets) > 1 else min(bucket_mb, first_mb)
            if sum(each.nbytes for each in buckets[-1]) >= limit * 2**20:
                buckets.append([])
        return [bucket for bucket in buckets if bucket]

    def gradient_is_ready(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        """Called by autograd. Moves the gradient into its bucket, and starts the buckets that are full."""
        if not self.do_sync:
            return
        torch.div(parameter.grad, self.world_size, out=bucket.views[parameter])
        parameter.grad = bucket.views[parameter]
        bucket.missing.discard(parameter)
        # Collectives are matched by their order, so buckets start in one order on all ranks, whichever is full first.
        while len(self.under_way) < len(self.buckets) and not self.buckets[len(self.under_way)].missing:
            full = self.buckets[len(self.under_way)]
            self.under_way.append(dist.all_reduce(full.flat, group=self.group, async_op=True))

    def sync_gradients(self) -> None:
        """Wait for the buckets. The gradients are views of them."""
        if not self.do_sync:
            return
        for work, bucket in zip(self.under_way, self.buckets, strict=True):
            work.wait()
            bucket.missing = set(bucket.views)
        self.under_way.clear()
