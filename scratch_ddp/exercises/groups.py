"""Keep the default process group usable whatever an answer does in it.

An answer is checked in the default group, since learners forget `group`. Only a watched group (that of rank cells) lets
go of a rank that waits in it. So where the default group is another one, a watched twin stands in for it meanwhile.
"""

import contextlib
import weakref
from collections.abc import Iterator

import torch.distributed as dist

from scratch_ddp.cells import watched_group
from scratch_ddp.exercises.meeting import Meeting

_twins: "weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]" = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def watched_default_group() -> Iterator[None]:
    """Inside, the default group is one that a signal can interrupt. Collective.

    Groups and meshes made before stay what they are: in those, plain gloo or NCCL is not bounded.
    """
    default = dist.group.WORLD
    if dist.get_backend() == watched_group.BACKEND:
        yield
        return
    if default not in _twins:
        _twins[default] = dist.new_group(backend=watched_group.BACKEND)
    dist.distributed_c10d._update_default_pg(_twins[default])
    try:
        yield
    finally:
        if dist.is_initialized():  # else the answer has destroyed all groups
            dist.distributed_c10d._update_default_pg(default)


def renew(seconds: float) -> str:
    """Make the watched groups usable after an answer spoiled them. Collective, over the store; returns what failed."""
    try:
        watched_group.renew_groups(seconds)
    except TimeoutError as error:
        return f"The process group is still spoiled: {error}."
    return ""


def make_anew(meeting: Meeting, backend: str) -> str:
    """Make the default group again after it was destroyed on some rank. Collective; returns what to say."""
    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.PrefixStore(f"made anew after {meeting.name}", meeting.store)
    dist.init_process_group(backend, store=store, rank=meeting.rank, world_size=meeting.size)
    return "The answer destroyed the process group. It was made anew: make your own groups and meshes again."
