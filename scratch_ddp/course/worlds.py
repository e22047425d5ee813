"""The worlds in which an answer is tried: all ranks first, then all but rank 0.

An answer that has this notebook's number of ranks written into it is right on all ranks and wrong elsewhere. So an
answer that has passed there is tried once more. If it takes a `group`, that is a group of ranks 1 to n-1, then one of
the last rank alone, and nothing may travel outside of it. Otherwise ranks 1 to n-1 have a default group of their own,
in which they are ranks 0 to n-2. The ranks that are not in a world wait.
"""

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist

from scratch_ddp.cells.rank import interruptible_group
from scratch_ddp.course.meeting import GRACE, Meeting
from scratch_ddp.course.wording import ranks

Seats = tuple[int, ...]
# By default group: the groups of other worlds; None where this rank has no seat.
_groups: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Seats, dist.ProcessGroup | None]]"
_groups = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class World:
    """seats: its ranks among all ranks. members: the same ranks as its default group numbers them.

    group: what is passed as `group`; None: nothing is. place: how a complaint names it.
    """

    seats: tuple[int, ...]
    members: tuple[int, ...]
    group: dist.ProcessGroup | None = None
    place: str = ""


def all_ranks() -> World:
    seats = tuple(range(dist.get_world_size()))
    return World(seats, seats)


def other_worlds(n: int, takes_group: bool) -> list[Seats]:
    """The seats in each of the other worlds, where there are n ranks in all."""
    last = (n - 1,)
    return [tuple(range(1, n)), last] if takes_group and n > 2 else [tuple(range(1, n))]


@contextlib.contextmanager
def another_world(seats: Seats, takes_group: bool, meeting: Meeting) -> Iterator[World | None]:
    """The world of the ranks `seats`; None on the others. All ranks of the meeting enter it."""
    default = dist.group.WORLD
    groups = _groups.setdefault(default, {})
    lost = seats not in groups or getattr(groups[seats], "retired", False)  # a rank that replaces another has none
    if any(meeting.exchange(lost, GRACE)):
        group = dist.new_group(list(seats), backend=interruptible_group.BACKEND)
        groups[seats] = group if dist.get_rank() in seats else None
    group = groups[seats]
    if group is None:
        yield None
    elif takes_group:
        yield World(seats, seats, group, f"in a group of {ranks(seats).lower()}")
    else:
        with _as_default(group):
            yield World(seats, tuple(range(len(seats))), None, f"on {len(seats)} rank{'s' if len(seats) > 1 else ''}")


def align_group_count(meeting: Meeting) -> None:
    """torch names groups by counting them. Ranks that made groups in their own world have counted further."""
    world = dist.distributed_c10d._world
    world.group_count = max(meeting.exchange(world.group_count, GRACE))


@contextlib.contextmanager
def _as_default(group: dist.ProcessGroup) -> Iterator[None]:
    """Make `group` the default group of its ranks, and number them from 0."""
    world, default = dist.distributed_c10d._world, dist.group.WORLD
    numbers = world.pg_group_ranks[group]
    world.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}
    dist.distributed_c10d._update_default_pg(group)
    try:
        yield
    finally:
        if group in world.pg_group_ranks:  # else the answer has destroyed it
            world.pg_group_ranks[group] = numbers
        dist.distributed_c10d._update_default_pg(default)
