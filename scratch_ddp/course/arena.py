"""The arena: a process group of the check's own, in which an answer can do no harm.

It is the default group while a check runs. So an answer that hangs, or leaves messages behind, spoils nothing of the
learner's: it is thrown away then, and otherwise kept for the next check. It is interruptible whatever the learner's
group is. Ranks tell each other how a call ended by polling the store: a collective there would look like a deadlock to
the kernel.
"""

import json
import pickle
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from scratch_ddp.cells.flight_recorder import ALL_THE_SAME, describe_call
from scratch_ddp.cells.rank import interruptible_group
from scratch_ddp.cells.words import name_ranks
from scratch_ddp.course.exercise import At, Wrong

GRACE = 5.0  # seconds that a rank may be behind the others


class RanksMissing(TimeoutError):
    """Some ranks did not come in time: `RanksMissing([2, 3])`."""


class Arena:
    """All ranks, met for one check. Collective; raises RuntimeError if not all come within GRACE seconds.

    `with arena:` makes its group the default one. Set `spoilt` in it, on all ranks, if a call has failed. The store
    counts who has come or given up, and so names the checks.
    """

    group: dist.ProcessGroup | None = None  # of the last check, or a new one

    def __init__(self) -> None:
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        self.everyone = At(self.rank, self.n, tuple(range(self.n)))
        self.store = dist.distributed_c10d._get_default_store()
        self.name, self.spoilt = f"check {self.store.add('checks', 0)}", False
        here = self.group in dist.distributed_c10d._world.pg_map and not self.group.retired
        try:
            groups = self.exchange("start", self.group.uid if here else None, GRACE)
        except RanksMissing as error:
            late = f"a check runs on every rank: {name_ranks(error.args[0])} did not come within {GRACE:g} s"
            raise RuntimeError(f"{late}. Run the cell without %%rank. If it failed there, mend that first.") from None
        finally:
            self.store.add("checks", 1)  # who comes later is in another check
        self._is_kept = here and len(set(groups)) == 1  # else a rank is new, or has thrown its group away

    def exchange(self, place: str, fact: Any, seconds: float, members: Sequence[int] | None = None) -> list[Any]:
        """Every member's fact, in their order. `place` is where in the check they are. Raises RanksMissing."""
        keys = [f"{self.name}/{place}/{rank}" for rank in members or range(self.n)]
        self.store.set(f"{self.name}/{place}/{self.rank}", pickle.dumps(fact))
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.store.check(keys):
                return [pickle.loads(each) for each in self.store.multi_get(keys)]
            time.sleep(0.001)
        raise RanksMissing([int(key.split("/")[-1]) for key in keys if not self.store.check([key])])

    def __enter__(self) -> "Arena":
        self._learners, self._known = dist.group.WORLD, set(dist.distributed_c10d._world.pg_names) - {self.group}
        if not self._is_kept:
            self._end(self._own())
            Arena.group = dist.new_group(backend=interruptible_group.BACKEND)
        self.group.rests = False
        dist.distributed_c10d._update_default_pg(self.group)
        return self

    def __exit__(self, error: type | None, *_: Any) -> None:
        dist.distributed_c10d._update_default_pg(self._learners)
        kept = set() if error or self.spoilt else {self.group}
        self._end(self._own() - kept)
        self.group.rests = True
        if self.spoilt and not error:  # torch counts groups to name them, and some ranks may have made more
            world = dist.distributed_c10d._world
            world.group_count = max(self.exchange("groups", world.group_count, GRACE))

    def end_connections(self) -> None:
        """End all waits in the arena's group and those made in it, in errors. Nothing can be sent there any more."""
        for group in self._own():
            if isinstance(group, interruptible_group.InterruptibleGroup):
                group.end_connections()

    def _own(self) -> set[dist.ProcessGroup]:
        return set(dist.distributed_c10d._world.pg_names) - self._known

    def _end(self, groups: set[dist.ProcessGroup]) -> None:
        for group in groups:
            if isinstance(group, interruptible_group.InterruptibleGroup):
                group.retire()
            dist.destroy_process_group(group)


class Watch:
    """`with Watch(…):` looks at every call before gloo does, which would end the process where sizes differ.

    Raises ValueError for a call that does not fit, on the rank that comes to it second, and Wrong if a call goes
    through all ranks though the answer was given a group. Costs one operation of the store per call.
    """

    def __init__(self, arena: Arena, place: str, group: dist.ProcessGroup | None):
        self._store, self._place, self._rank = arena.store, f"{arena.name}/{place}", arena.rank
        self._forbidden = arena.group.group_name if group else ""

    def __enter__(self) -> None:
        interruptible_group.observers.append(self._see)

    def __exit__(self, *_: Any) -> None:
        interruptible_group.observers.remove(self._see)

    def _see(self, call: dict[str, Any]) -> None:
        if call["operation"] == "new_group":
            return
        if call["group"] == self._forbidden:
            raise Wrong("group", f"{call['operation']} goes through all ranks, should stay in `group`")
        place = f"{self._place}/{call['key']}/{call['position']}"
        way, _, peer = call["peer"].rpartition(" rank ")
        if not call["peer"]:
            self._see_collective(call, place)
        elif not peer.isdigit():
            raise ValueError("recv names no sender: a message of another call can be taken for this one")
        elif int(peer) == self._rank:
            raise ValueError(f"rank {peer} sends to itself")
        else:
            self._see_message(place, int(peer), call["given"], way == " to")

    def _see_collective(self, call: dict[str, Any], place: str) -> None:
        mine = describe_call(call | {"given": call.get("passed", call["given"])})
        rank, theirs = self._first_in(place, mine)
        if theirs != mine:
            called = [f"rank {one} called {what}" for one, what in sorted([(self._rank, mine), (rank, theirs)])]
            raise ValueError(f"{', '.join(called)}. {ALL_THE_SAME}")
        if "pieces" in call:  # of an all-to-all: rows to each rank, and from each
            for way, rows in zip((True, False), call["pieces"][1:], strict=True):
                for peer, number in zip(interruptible_group.ranks_of(call), rows, strict=True):
                    self._see_message(f"{place}/rows", peer, f"{number} × {call['given']}", way)

    def _see_message(self, place: str, peer: int, given: str, sends: bool) -> None:
        sender, receiver = (self._rank, peer) if sends else (peer, self._rank)
        _, theirs = self._first_in(f"{place}/{sender}>{receiver}", given)
        if theirs != given:
            sent, room = (given, theirs) if sends else (theirs, given)
            raise ValueError(f"rank {sender} sends {sent}, rank {receiver} receives into {room}")

    def _first_in(self, place: str, mine: str) -> list:
        """Who has come to this place first, and with what words."""
        return json.loads(self._store.compare_set(place, "", json.dumps([self._rank, mine])))
