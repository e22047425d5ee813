"""The arena: a process group of the check's own, in which an answer can do no harm.

It is the default group while a check runs, and is thrown away afterwards with every group that was made in it. So an
answer that hangs, or leaves messages behind, spoils nothing of the learner's. It is interruptible whatever the
learner's group is. Ranks tell each other how a call ended by polling the store: a collective there would look like a
deadlock to the kernel.
"""

import base64
import contextlib
import json
import pickle
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from scratch_ddp.cells.flight_recorder import ALL_THE_SAME, describe_call
from scratch_ddp.cells.rank import interruptible_group

GRACE = 5.0  # seconds that a rank may be behind the others


@dataclass(frozen=True)
class At:
    """Where inputs are made: on rank `rank` of `n`.

    group: None stands for all ranks. The engine passes it to the answer; inputs need it only to make more groups.
    members: global numbers of the n ranks, for arguments such as `src`.
    """

    rank: int
    n: int
    group: dist.ProcessGroup | None = None
    members: tuple[int, ...] = ()


class RanksMissing(TimeoutError):
    """Some ranks did not come in time; `missing` names them."""

    def __init__(self, missing: list[int]):
        self.missing = missing
        super().__init__(f"ranks {missing} did not come")


class Arena:
    """All ranks, met for one check. Collective; raises RanksMissing if not all come within GRACE seconds.

    `with arena:` makes its group the default one. Checks are counted in the store, and only those to which all came.
    """

    def __init__(self) -> None:
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        self._store = dist.distributed_c10d._get_default_store()
        self._name = f"check {self._store.add('checks', 0)}"
        try:
            self.exchange("start", None, GRACE)
        except BaseException:
            self._store.set(f"{self._name}/start/{self.rank}", "gone")
            raise
        if self.rank == 0:
            self._store.add("checks", 1)

    def exchange(self, place: str, fact: Any, seconds: float, members: Sequence[int] | None = None) -> list[Any]:
        """Every member's fact, in their order. `place` is where in the check they are. Raises RanksMissing."""
        members = range(self.n) if members is None else members
        keys = [f"{self._name}/{place}/{rank}" for rank in members]
        self._store.set(f"{self._name}/{place}/{self.rank}", base64.b64encode(pickle.dumps(fact)).decode())
        deadline = time.monotonic() + seconds
        while True:
            said = self._store.multi_get(keys) if self._store.check(keys) else []
            if said and b"gone" not in said:
                return [pickle.loads(base64.b64decode(each)) for each in said]
            if time.monotonic() > deadline:
                raise RanksMissing(
                    [rank for rank, key in zip(members, keys, strict=True) if not self._store.check([key])]
                )
            time.sleep(0.001)

    def fail(self, place: str) -> None:
        """Tell the others that this rank's call has failed: they need not wait for it any longer."""
        self._store.set(f"{self._name}/{place}/failed", "")

    def failed(self, place: str) -> bool:
        """Whether some rank's call has."""
        return self._store.check([f"{self._name}/{place}/failed"])

    def __enter__(self) -> "Arena":
        world = dist.distributed_c10d._world
        self._learners, self._known = dist.group.WORLD, set(world.pg_names)
        self.group = dist.new_group(backend=interruptible_group.BACKEND)
        dist.distributed_c10d._update_default_pg(self.group)
        self._destroy = dist.destroy_process_group
        dist.destroy_process_group = self._refuse_to_destroy
        return self

    def __exit__(self, *_: Any) -> None:
        world = dist.distributed_c10d._world
        dist.destroy_process_group = self._destroy
        dist.distributed_c10d._update_default_pg(self._learners)
        for group in set(world.pg_names) - self._known:
            if isinstance(group, interruptible_group.InterruptibleGroup):
                group.retire()
            dist.destroy_process_group(group)

    def _refuse_to_destroy(self, group: dist.ProcessGroup | None = None) -> None:
        if group is None or group is dist.group.WORLD:
            raise RuntimeError("destroy_process_group would end the process group that all cells share")
        self._destroy(group)

    def part(self, members: Sequence[int]) -> dist.ProcessGroup:
        """A group of some ranks. Collective over all ranks."""
        return dist.new_group(list(members), backend=interruptible_group.BACKEND)

    def count_groups_alike(self, seconds: float) -> None:
        """torch names new groups by counting them; ranks that have made groups in parts have counted further."""
        world = dist.distributed_c10d._world
        world.group_count = max(self.exchange("groups", world.group_count, seconds))

    @contextlib.contextmanager
    def watched(self, place: str, group: dist.ProcessGroup | None) -> Iterator["Calls"]:
        """Look at every call before gloo does, which would end the process where sizes differ.

        group: nothing may go through all ranks then. Costs one operation of the store per collective, two per message.
        """
        calls = Calls(self._store, f"{self._name}/{place}", self.rank, self.group.group_name if group else "")
        interruptible_group.observers.append(calls.see)
        try:
            yield calls
        finally:
            interruptible_group.observers.remove(calls.see)


class Calls:
    """The calls of this rank. Raises ValueError for one that does not fit, on the rank that comes to it second.

    largest: bytes of the largest message that this rank has sent to another one.
    """

    def __init__(self, store: dist.Store, place: str, rank: int, forbidden: str):
        self._store, self._place, self._rank, self._forbidden = store, place, rank, forbidden
        self._numbers: Counter[str] = Counter()
        self.largest = 0
        self.stray = ""  # a call on all ranks where the answer was given a group

    def see(self, call: dict[str, Any]) -> None:
        if call["operation"] == "new_group":
            return
        if call["group"] == self._forbidden:
            self.stray = call["operation"]
            raise ValueError(f"{call['operation']} goes through all ranks, should stay in `group`")
        if "pieces" in call:
            self._compare_pieces(call)
        if not call["peer"]:
            self._compare_collectives(call)
            return
        way, _, peer = call["peer"].strip().rpartition(" rank ")
        if not peer.isdigit():
            raise ValueError("recv names no sender: a message of another call can be taken for this one")
        self._compare_message(call, way == "to", int(peer))

    def _compare_collectives(self, call: dict[str, Any]) -> None:
        mine = describe_call(call | {"given": call.get("passed", call["given"])})
        self._numbers[call["group"]] += 1
        place = f"{self._place}/{call['group']}/{self._numbers[call['group']]}"
        rank, theirs = json.loads(self._store.compare_set(place, "", json.dumps([self._rank, mine])))
        if theirs != mine:
            raise ValueError(f"rank {self._rank} called {mine}, rank {rank} called {theirs}. {ALL_THE_SAME}")

    def _compare_message(self, call: dict[str, Any], sends: bool, peer: int) -> None:
        if peer == self._rank:
            raise ValueError(f"rank {peer} {'sends to' if sends else 'receives from'} itself")
        sender, receiver = (self._rank, peer) if sends else (peer, self._rank)
        if sends:
            self.largest = max(self.largest, _nbytes(call["given"]))
        message = f"{self._place}/{call['group']}/{sender} to {receiver}"
        self._numbers[message] += 1
        place, given = f"{message}/{self._numbers[message]}", call["given"]
        theirs = self._other(place, sends, given)
        sent, room = (given, theirs) if sends else (theirs, given)
        if theirs and (_nbytes(sent) > _nbytes(room) or sent.split()[-1] != room.split()[-1]):
            raise ValueError(f"rank {sender} sends {sent}, rank {receiver} receives into {room}")

    def _compare_pieces(self, call: dict[str, Any]) -> None:
        """Of an all-to-all: what each rank sends to another is what that one expects."""
        rank, sent, expected = call["pieces"]
        for other in range(len(sent)):
            for sends, sender, receiver in ((True, rank, other), (False, other, rank)):
                place = f"{self._place}/{call['group']}/all-to-all {call['number']}/{sender} to {receiver}"
                mine = sent[other] if sends else expected[other]
                theirs = self._other(place, sends, str(mine))
                if theirs and int(theirs) != mine:
                    out, room = (mine, int(theirs)) if sends else (int(theirs), mine)
                    raise ValueError(f"rank {sender} sends {out} elements to rank {receiver}, which expects {room}")

    def _other(self, place: str, sends: bool, given: str) -> str:
        """Write down one end of a message; what stands at the other, "" if nothing does yet."""
        mine, theirs = ("out", "in") if sends else ("in", "out")
        self._store.set(f"{place}/{mine}", given)
        return self._store.get(f"{place}/{theirs}").decode() if self._store.check([f"{place}/{theirs}"]) else ""


def _nbytes(given: str) -> int:
    """Of "4 × float32"."""
    number, _, dtype = given.partition(" × ")
    return int(number) * getattr(torch, dtype).itemsize
