"""`lone_rank`: one process stands for one rank of n, so that a laptop can time what a rank of 64 does.

There are no peers: every other rank is taken to hold the same tensors.
"""

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.utils._pytree import tree_leaves

from scratch_ddp.instruments.cost.wire import Link
from scratch_ddp.instruments.network.linked import LinkedGroup, register

_made = itertools.count()


class LoneGroup(LinkedGroup):
    """A group on a link over torch's fake backend, which sends nothing and copies this rank's tensors to its outputs.

    What depends on other ranks alone, such as a receive, stays unchanged.
    """

    def __init__(self, rank: int, size: int, link: Link | str | None):
        below = dist.ProcessGroup(rank, size)
        fake = FakeProcessGroup._create_internal(rank, size, FakeProcessGroup.Options())
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            below._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, fake)
        below._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        super().__init__(below, link)

    def _run(self, method: str, args: tuple, kwargs: dict[str, Any]) -> dist.Work:
        work = super()._run(method, args, kwargs)
        if any(getattr(each, "reduceOp", None) == dist.ReduceOp.SUM for each in (*args, *kwargs.values())):
            for output in tree_leaves(args[0]):
                output.mul_(self.size())
        return work


def lone_rank(world_size: int, link: Link | str | None, rank: int = 0) -> LinkedGroup:
    """Return a process group of `world_size` ranks of which only `rank` exists: this process.

    Every peer is taken to hold the same tensors at the same time, which is right for timing and for averages of equal
    gradients: SUM multiplies by `world_size`, other reductions return them as they are. Use the group like a
    `linked_group`. If there is no default group it becomes the default, until `dist.destroy_process_group()`. Otherwise
    it is an additional group, whose absent ranks have numbers that no other rank has. No communication. Raises
    ValueError for an unknown preset.
    """
    group = LoneGroup(rank, world_size, link)
    is_first = not dist.is_initialized()
    own_number = rank if is_first else dist.get_rank()
    others = (number for number in range(world_size + 1) if number != own_number)
    numbers = [own_number if each == rank else next(others) for each in range(world_size)]
    config = "cpu:lone,cuda:lone" if torch.cuda.is_available() else "cpu:lone"
    register(group, f"lone rank {next(_made)}", numbers, "lone", config, dist.HashStore())
    if is_first:
        dist.distributed_c10d._update_default_pg(group)
    else:
        group.follow(dist.group.WORLD)
    return group
