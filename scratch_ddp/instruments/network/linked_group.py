"""`linked_group`: the ranks of a group on a simulated link."""

import contextlib
import datetime

import torch.distributed as dist

from scratch_ddp.agreement import raise_everywhere
from scratch_ddp.link.board import shared_board
from scratch_ddp.link.group import LinkedGroup
from scratch_ddp.link.links import Link
from scratch_ddp.link.presets import as_link
from scratch_ddp.link.registration import register


def linked_group(link: Link | str | None, group: dist.ProcessGroup | None = None) -> LinkedGroup:
    """Return a process group of the same ranks as `group` (default: all), whose operations take time on `link`.

    `link` is a Link, a preset's name, or None for none to begin with. The data moves over a group of its own, with what
    `group` uses for tensors in main memory: gloo, or the group of rank cells. Beside NCCL too it is gloo, which copies
    a GPU's tensors to main memory and back: NCCL lets a rank go on before the data is there, so that nobody could say
    when a transfer had ended. Pass the new group wherever torch takes one:

        slow = linked_group("Ethernet 10 Gb")
        dist.all_reduce(tensor, group=slow)
        model = DistributedDataParallel(model, process_group=slow)
        model = fully_shard(model, mesh=DeviceMesh.from_group(slow, "cpu"))
        slow.link = "NVLink 4"                       # another link; None: no link
        dist.destroy_process_group(slow)

    Collective: every rank of `group` calls it. Raises ValueError on every rank if on any rank there is no such
    preset, RuntimeError if there is no process group. Costs a new group and two small object collectives.
    """
    outside = group == dist.GroupMember.NON_GROUP_MEMBER  # what new_group returns to ranks that are not in the group
    if not (group is None or outside or isinstance(group, dist.ProcessGroup)):
        raise TypeError(f"a process group or None is needed, not {type(group).__name__} (of a mesh: mesh.get_group())")
    if not dist.is_initialized():
        raise RuntimeError(
            "there is no process group whose ranks could be linked: %dist_init makes one in a notebook, torchrun and "
            "dist.init_process_group() in a script; lone_rank() needs none"
        )
    if outside or dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group: link it on the group's ranks only")
    if isinstance(group or dist.group.WORLD, LinkedGroup):
        raise ValueError("this group is on a link already: set its .link")
    problem, found = None, None
    try:
        found = as_link(link)
    except (ValueError, TypeError) as error:
        problem = str(error)
    raise_everywhere(problem, group)
    ranks = dist.get_process_group_ranks(group)
    below = _twin(group, ranks)
    linked = LinkedGroup(below, dist.get_rank(group), len(ranks), found, shared_board(below))
    world = dist.distributed_c10d._world
    backend, store = world.pg_map[below]
    register(linked, f"{below.group_name} on a link", ranks, backend, world.pg_backend_config[below], store)
    linked.follow(below)
    return linked


def _twin(group: dist.ProcessGroup | None, ranks: list[int]) -> dist.ProcessGroup:
    """A group of the same ranks with the same time limit, over what carries tensors of main memory."""
    whole_world = len(ranks) == dist.get_world_size()
    return dist.new_group(
        ranks,
        timeout=_timeout(group or dist.group.WORLD),
        backend=_backend_on_cpu(group),
        use_local_synchronization=not whole_world,
    )


def _backend_on_cpu(group: dist.ProcessGroup | None) -> str:
    """What the group uses for tensors in main memory; gloo where it has nothing for them, as with NCCL alone."""
    of_device = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))  # "cpu:gloo,cuda:nccl"
    return of_device.get("cpu", "gloo")


def _timeout(group: dist.ProcessGroup) -> datetime.timedelta | None:
    for device in group._device_types:
        with contextlib.suppress(AttributeError, RuntimeError):
            return group._get_backend(device).options._timeout
    return None
