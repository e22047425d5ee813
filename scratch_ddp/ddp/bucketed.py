"""`BucketedDDP`: gradients travel in a few large messages. Here is which of them share one; `reducer` sends them."""

from collections.abc import Sequence

from torch import nn

from scratch_ddp.common.tensors import MB, group_alike
from scratch_ddp.common.wrapper import Group
from scratch_ddp.ddp.reducer import OverlappedDDP

FIRST_BUCKET_MB = 1.0  # as in torch's DDP: communication starts early


class BucketedDDP(OverlappedDDP):
    """As `OverlappedDDP`, but the gradients are averaged in buckets: one all-reduce for each.

    A bucket holds gradients of one dtype and device, in the reverse order of registration. It is closed by the gradient
    with which it reaches `bucket_mb` · 2²⁰ bytes, as in torch's DDP; the first one at 1 MB already, so that
    communication starts early. Buckets are allocated once; after `sync_gradients()` the gradients are views of them. A
    bucket travels whole, with zeros where no rank has a gradient.
    `bucket_mb`: the same positive number on every rank.
    """

    def __init__(self, model: nn.Module, bucket_mb: float = 25.0, group: Group = None):
        self.bucket_mb = bucket_mb
        super().__init__(model, group)

    def share_buckets(self, parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Group parameters by `bucket_groups`."""
        return bucket_groups(parameters, self.bucket_mb)


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
