"""The worlds in which an answer is tried: all ranks first, then all but rank 0.

An answer that has this notebook's number of ranks written into it is right on all ranks and wrong elsewhere. So an
answer that has passed there is tried once more. If it takes a `group`, that is a group of ranks 1 to n-1 and, at the
same time, one of rank 0 alone, and nothing may travel outside of it. Otherwise ranks 1 to n-1 have a default group of
their own, in which they are ranks 0 to n-2, and rank 0 waits.
"""

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from scratch_ddp.cells.rank import interruptible_group
from scratch_ddp.course.meeting import GRACE, Meeting
from scratch_ddp.course.stand_in_group import messages_end_at_once
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
    """The seats in each of the other worlds, where there are n ranks in all. No rank sits in two of them."""
    return [tuple(range(1, n)), (0,)] if takes_group and n > 2 else [tuple(range(1, n))]


@contextlib.contextmanager
def another_world(worlds: list[Seats], takes_group: bool, meeting: Meeting) -> Iterator[World | None]:
    """The world in which this rank sits; None if in none of them. All ranks of the meeting enter it together."""
    default = dist.group.WORLD
    groups = _groups.setdefault(default, {})
    everyones = exchange_with_group_count(meeting, [_is_lost(seats, groups) for seats in worlds])
    for seats, lost in zip(worlds, zip(*everyones, strict=True), strict=True):
        if any(lost):
            group = dist.new_group(list(seats), backend=interruptible_group.BACKEND)
            groups[seats] = group if dist.get_rank() in seats else None
            _names().pop(groups[seats], None)
    seats = next((seats for seats in worlds if dist.get_rank() in seats), None)
    if seats is None:
        yield None
        return
    group = groups[seats]
    _names()[group] = group.group_name
    try:
        with _as_world(seats, group, takes_group) as world:
            yield world
    finally:
        _names().pop(group, None)


def _is_lost(seats: Seats, groups: dict[Seats, dist.ProcessGroup | None]) -> bool:
    """A rank that replaces another has not got it, or an answer has destroyed it."""
    if seats not in groups:
        return True
    group = groups[seats]
    return group is not None and (group.retired or group not in dist.distributed_c10d._world.pg_group_ranks)


def _names() -> dict[dist.ProcessGroup, str]:
    """What torch names new groups of some ranks by: how many there are. So all ranks must have equally many."""
    return dist.distributed_c10d._world.pg_names


def all_groups() -> set[dist.ProcessGroup]:
    """Those that this rank has now."""
    return set(_names())


def destroy_all_but(groups: set[dist.ProcessGroup]) -> None:
    """Destroy what was made since these were all."""
    for group in all_groups() - groups:
        dist.destroy_process_group(group)


@contextlib.contextmanager
def _as_world(seats: Seats, group: dist.ProcessGroup, takes_group: bool) -> Iterator[World]:
    if takes_group:
        with messages_end_at_once():  # which the answer has no business to start
            yield World(seats, seats, group, f"in a group of {ranks(seats).lower()} (numbered from 0)")
    else:
        with _as_default(group):
            yield World(seats, tuple(range(len(seats))), None, f"on {len(seats)} rank{'s' if len(seats) > 1 else ''}")


def exchange_with_group_count(meeting: Meeting, fact: Any) -> list[Any]:
    """Every rank's fact. And all ranks count their groups alike afterwards, for torch names a group by this count.

    Ranks that have made groups in a world of their own have counted further.
    """
    world = dist.distributed_c10d._world
    facts = meeting.exchange([fact, world.group_count], GRACE)
    world.group_count = max(count for _, count in facts)
    return [fact for fact, _ in facts]


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
