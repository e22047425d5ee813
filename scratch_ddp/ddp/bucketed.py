"""Data parallelism that hides few, large messages behind backward: gradients travel in buckets.

When a bucket is filled and sent is decided in `reducer.py`; here is which gradients share one, and the memory for it.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from scratch_ddp.common.tensors import MB, group_alike
from scratch_ddp.common.wrapper import Group
from scratch_ddp.ddp.reducer import HookedModule

FIRST_BUCKET_MB = 1.0  # as in torch's DDP: communication starts early


class BucketedDDP(HookedModule):
    """A model that starts with the first rank's values, and whose gradients are averaged in buckets during backward.

    A bucket holds gradients of one dtype and device, in the reverse order of registration. It is closed by the gradient
    with which it reaches `bucket_mb` · 2²⁰ bytes, as in torch's DDP; the first one at 1 MB already, so that
    communication starts early. Buckets are allocated once; after `sync_gradients()` the gradients are views of them.
    `group` as for `ReplicatedModule`, which also says what is checked; `HookedModule` says what happens to gradients.
    Raises ValueError on every rank if `bucket_mb` is not a positive number, or not the same number everywhere.

    Costs one broadcast per dtype when it is built. Each step costs one asynchronous all-reduce per bucket, and one
    small exchange of which parameters have a gradient. A bucket travels whole, with zeros where no rank has a gradient.
    """

    def __init__(self, model: nn.Module, bucket_mb: float = 25.0, group: Group = None, *, sync: str = "call"):
        self.bucket_mb = bucket_mb
        problem = _bucket_mb_problem(bucket_mb)
        super().__init__(model, group, sync=sync, settings=f"bucket_mb={bucket_mb!r}", problem=problem)

    def make_buckets(self, parameters: list[nn.Parameter]) -> list["Bucket"]:
        """A bucket for each group of parameters."""
        return [Bucket(group) for group in bucket_groups(parameters, self.bucket_mb)]


class Bucket:
    """A bucket in which gradients lie one after the other in one tensor, which is allocated once."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters = parameters
        sizes = [parameter.numel() for parameter in parameters]
        self.tensor = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
        parts = self.tensor.split(sizes)
        self._views = {each: _laid_out_as(each, part) for each, part in zip(parameters, parts, strict=True)}

    def put(self, parameter: nn.Parameter, world_size: int) -> None:
        torch.div(parameter.grad, world_size, out=self._views[parameter])  # copies and divides in one pass

    def put_zeros(self, parameter: nn.Parameter) -> None:
        if parameter.grad is not None and not parameter.requires_grad:
            parameter.grad = parameter.grad.clone()  # frozen: it keeps its gradient, perhaps a view of this bucket
        self._views[parameter].zero_()

    def mean(self, parameter: nn.Parameter) -> torch.Tensor:
        return self._views[parameter].detach()  # so that `.grad.data = …` leaves the view alone


def bucket_groups(parameters: Sequence[nn.Parameter], bucket_mb: float) -> list[list[nn.Parameter]]:
    """Group parameters in their order, each group of one dtype and device, by the rule of `bucket_plan`.

    Groups are in the order of their last parameters, in which they become full.
    """
    position = {parameter: place for place, parameter in enumerate(parameters)}
    limit, first = bucket_mb * MB, min(bucket_mb, FIRST_BUCKET_MB) * MB
    groups = [
        [alike[place] for place in bucket]
        for alike in group_alike(parameters)
        for bucket in bucket_plan([each.nbytes for each in alike], limit, first)
    ]
    return sorted(groups, key=lambda group: position[group[-1]])


def bucket_plan(nbytes: Sequence[int], limit: float, first: float) -> list[list[int]]:
    """Put gradients, given by their bytes in the order of arrival, into buckets; returns their positions.

    The rule of torch's DDP: a bucket is closed by the gradient with which it reaches `limit` bytes (the first bucket:
    `first` bytes), so a gradient is never cut and a bucket may be larger than the limit.
    """
    buckets: list[list[int]] = [[]]
    held = 0
    for position, size in enumerate(nbytes):
        buckets[-1].append(position)
        held += size
        if held >= (first if len(buckets) == 1 else limit):
            buckets.append([])
            held = 0
    return [bucket for bucket in buckets if bucket]


def _laid_out_as(parameter: nn.Parameter, part: torch.Tensor) -> torch.Tensor:
    """A view of `part` with the parameter's shape and strides, which may be those of a transposed tensor."""
    strides = torch.empty_like(parameter, device="meta").stride()
    return part.as_strided(parameter.shape, strides)


def _bucket_mb_problem(bucket_mb: object) -> str | None:
    if isinstance(bucket_mb, (int, float)) and not isinstance(bucket_mb, bool) and bucket_mb > 0:  # nan is not
        return None
    if isinstance(bucket_mb, (dist.ProcessGroup, DeviceMesh)):
        return f"the {type(bucket_mb).__name__} was taken for bucket_mb: pass it by name, BucketedDDP(model, group=…)"
    return f"bucket_mb must be a positive number (of 2²⁰ bytes), not {bucket_mb!r}"
