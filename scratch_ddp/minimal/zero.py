"""ZeRO-1 and ZeRO-2: each rank keeps optimizer state, and then gradients too, for a share of the parameters only.

Every parameter has one owner. In a step each rank updates what it owns, with an ordinary optimizer that knows nothing
else, and sends the new values to the others. All ranks still hold all parameters.

    model = BucketedDDP(model)                                        # ZeRO-1: averages all gradients on all ranks
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    for batch in loader:
        model(batch).backward()
        model.sync_gradients()
        optimizer.step()
        optimizer.zero_grad()

For ZeRO-2, `reduce_gradients(optimizer)` takes the place of `sync_gradients()`: an owner needs the mean of its own
parameters' gradients only.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, section 5.
Left out: parameter groups, closures, checkpoints, several dtypes, parameters without a gradient, and every check. An
optimizer that looks at all parameters at once (LBFGS) would compute something else.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def share_out(sizes: list[int], n: int) -> list[int]:
    """Return the owner of each item: the largest first, each to the rank that has least so far."""
    owners, loads = [0] * len(sizes), [0] * n
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        owners[item] = loads.index(min(loads))
        loads[owners[item]] += sizes[item]
    return owners


class ShardedOptimizer:
    """An optimizer of which each rank holds the state for about 1/n of the parameters."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        optimizer_cls: type[torch.optim.Optimizer],
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ):
        self.params, self.group = list(params), group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        owners = share_out([parameter.nbytes for parameter in self.params], self.world_size)
        self.owner = dict(zip(self.params, owners, strict=True))  # computed alike on every rank
        self.mine = [parameter for parameter in self.params if self.owner[parameter] == self.rank]
        # A rank may own nothing, and torch's optimizers refuse an empty list.
        self.optimizer = optimizer_cls(self.mine or [torch.zeros(0)], **options)

    @torch.no_grad()
    def step(self) -> None:
        """Update what this rank owns, then bring every parameter from its owner. One broadcast per parameter.

        On a ring a rank sends, and receives, (n-1)/n of the parameters' bytes: an all-gather of uneven shares.
        """
        self.optimizer.step()
        under_way = [
            dist.broadcast(parameter, group=self.group, group_src=self.owner[parameter], async_op=True)
            for parameter in self.params
        ]
        for work in under_way:
            work.wait()

    def zero_grad(self) -> None:
        """Clear every gradient, not only those of this rank's share."""
        for parameter in self.params:
            parameter.grad = None

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Any]]:
        """What this rank keeps: of AdamW, two tensors for each parameter that it owns."""
        return self.optimizer.state


@torch.no_grad()
def reduce_gradients(optimizer: ShardedOptimizer) -> None:
    """Leave the mean of each gradient on the parameter's owner, and free it everywhere else. One reduce per parameter.

    A rank sends (n-1)/n of the gradients' bytes on a ring: a reduce-scatter of uneven shares, half an all-reduce.
    """
    for parameter in optimizer.params:
        parameter.grad /= optimizer.world_size
        dist.reduce(parameter.grad, group=optimizer.group, group_dst=optimizer.owner[parameter])
        if optimizer.owner[parameter] != optimizer.rank:
            parameter.grad = None
