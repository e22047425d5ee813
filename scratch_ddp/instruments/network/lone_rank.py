"""`lone_rank`: one process stands for one rank of n, so that a laptop feels what 64 ranks would."""

import torch
import torch.distributed as dist

from scratch_ddp.link.alone import Alone
from scratch_ddp.link.group import LinkedGroup
from scratch_ddp.link.links import Link
from scratch_ddp.link.presets import as_link
from scratch_ddp.link.registration import free_name, make_default, register

BACKEND = "lone"


def lone_rank(world_size: int, link: Link | str | None, rank: int = 0) -> LinkedGroup:
    """Return a process group of `world_size` ranks of which only `rank` exists: this process.

    Every peer is taken to hold the very same tensors at the same time, which is right for timing and for averages of
    equal gradients (AVG, MIN and MAX give them back bit for bit, SUM multiplies by `world_size`). Use it as a
    `linked_group`. Without a default group it becomes the default one, until `dist.destroy_process_group()`; with one
    it is a further group, whose absent ranks have numbers that nobody else has.

    An interrupt ends a wait at once and frees the link. torch's DDP waits in C++, where only a rank cell's Stop reaches
    it; elsewhere Python sees the interrupt when that wait is over.

    No communication. Raises ValueError for a world size below 1, a rank outside of it, an unknown preset.
    """
    found = as_link(link)
    if not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size must be a whole number of ranks, 1 or more, not {world_size!r}")
    if not isinstance(rank, int) or not 0 <= rank < world_size:
        raise ValueError(f"rank must be one of 0 to {world_size - 1}, not {rank!r}")
    group = LinkedGroup(Alone(rank, world_size), rank, world_size, found)
    is_first = not dist.is_initialized()
    own_number = rank if is_first else dist.get_rank()
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    config = ",".join(f"{device}:{BACKEND}" for device in devices)
    register(group, free_name("lone rank"), _numbers(world_size, rank, own_number), BACKEND, config, dist.HashStore())
    if is_first:
        make_default(group)
    else:
        group.follow(dist.group.WORLD)
    return group


def _numbers(world_size: int, rank: int, own_number: int) -> list[int]:
    """Global numbers of all ranks: `own_number` for the one that exists, others for the rest."""
    others = (number for number in range(world_size + 1) if number != own_number)
    return [own_number if each == rank else next(others) for each in range(world_size)]


def _create(store: dist.Store, rank: int, size: int, timeout: object) -> LinkedGroup:
    """What torch calls for a further group among the ranks of a lone one."""
    link = dist.group.WORLD.link if isinstance(dist.group.WORLD, LinkedGroup) else None
    return LinkedGroup(Alone(rank, size), rank, size, link)


dist.Backend.register_backend(BACKEND, _create, devices=["cpu", "cuda"])
