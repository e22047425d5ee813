"""What goes on working whatever an answer does to the process group.

All ranks meet and exchange facts over the store, which does not need the group. And the default group, in which an
answer is checked since learners forget `group`, is one that can be interrupted and renewed.
"""

import base64
import contextlib
import copy
import json
import pickle
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from scratch_ddp.cells.rank import interruptible_group

GRACE = 5.0  # seconds that a rank may be behind the others

_used: dict[int, str] = {}  # by rank: the last token that a meeting of this process has used
_stand_ins: "weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]" = weakref.WeakKeyDictionary()


class RanksMissing(TimeoutError):
    """Some ranks did not come in time; `missing` names them."""

    def __init__(self, missing: list[int], seconds: float):
        self.missing, self.seconds = missing, seconds
        super().__init__(f"ranks {missing} did not come within {seconds:g} s")


class Meeting:
    """All ranks of the default group, until `close`. Collective; raises RanksMissing after `seconds`.

    A rank may have tried to meet more often than another, in a cell that ran on some ranks only. So meetings are not
    counted. Each rank leaves a fresh token, and withdraws it when it gives up or goes; the tokens name the meeting.
    """

    def __init__(self, seconds: float):
        self.store = dist.distributed_c10d._get_default_store()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._exchanges = 0
        self.store.set(self._arrival(self.rank), uuid.uuid4().hex[:12])
        try:
            self.name = self._gather_arrivals(seconds)
        except BaseException:
            self.close()
            raise

    def _arrival(self, rank: int) -> str:
        return f"exercises: arrival of rank {rank}"

    def _gather_arrivals(self, seconds: float) -> str:
        tokens: dict[int, str] = {}

        def missing() -> list[int]:
            for rank in range(self.size):
                if rank not in tokens and self.store.check([self._arrival(rank)]):
                    token = self.store.get(self._arrival(rank)).decode()
                    if token != "gone" and token != _used.get(rank):
                        tokens[rank] = token
            return [rank for rank in range(self.size) if rank not in tokens]

        _wait_until(lambda: not missing(), missing, seconds)
        _used.update(tokens)
        return ".".join(tokens[rank] for rank in range(self.size))

    def exchange(self, fact: Any, seconds: float) -> list[Any]:
        """Return every rank's fact, in rank order. Facts are JSON. Raises RanksMissing after `seconds`."""
        self._exchanges += 1
        keys = [f"exercises: {self.name}/{self._exchanges}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], json.dumps(fact))

        def missing() -> list[int]:
            return [rank for rank, key in enumerate(keys) if not self.store.check([key])]

        _wait_until(lambda: self.store.check(keys), missing, seconds)
        return [json.loads(fact) for fact in self.store.multi_get(keys)]

    def among(self, members: Sequence[int]) -> "Meeting":
        """The same meeting for some of the ranks, which are numbered anew. This rank is one of them."""
        part = copy.copy(self)
        part.name, part._exchanges = f"{self.name}/among {','.join(map(str, members))}/{self._exchanges}", 0
        part.rank, part.size = list(members).index(self.rank), len(members)
        return part

    def hear(self, fact: Any, seconds: float) -> Any:
        """Return what the first rank has to tell that tells anything; `fact` is None on ranks that only listen."""
        self._exchanges += 1
        keys = [f"exercises: {self.name}/{self._exchanges}/{rank}" for rank in range(self.size)]
        if fact is not None:
            self.store.set(keys[self.rank], json.dumps(fact))
        told: list[str] = []

        def heard() -> bool:
            told[:] = [key for key in keys if self.store.check([key])][:1]
            return bool(told)

        _wait_until(heard, lambda: list(range(self.size)), seconds)
        return json.loads(self.store.get(told[0]))

    def close(self) -> None:
        self.store.set(self._arrival(self.rank), "gone")


def _wait_until(done: Callable[[], bool], missing: Callable[[], list[int]], seconds: float) -> None:
    """Poll in Python, where an interrupt takes effect at once; the store's own wait can't be interrupted."""
    deadline, pause = time.monotonic() + seconds, 0.0005
    while not done():
        if time.monotonic() > deadline:
            raise RanksMissing(missing(), seconds)
        time.sleep(pause)
        pause = min(pause * 1.5, 0.002)


@contextlib.contextmanager
def interruptible_default_group() -> Iterator[None]:
    """Make the default group one whose waits a signal can end; if it is not, put one in its place. Collective.

    Other groups, and meshes, stay as they are: a wait inside plain gloo or NCCL is not ended.
    """
    default = dist.group.WORLD
    if dist.get_backend() == interruptible_group.BACKEND:
        yield
        return
    if default not in _stand_ins:
        _stand_ins[default] = dist.new_group(backend=interruptible_group.BACKEND)
    dist.distributed_c10d._update_default_pg(_stand_ins[default])
    try:
        yield
    finally:
        if dist.is_initialized():  # else the answer has destroyed all groups
            dist.distributed_c10d._update_default_pg(default)


def renew(seconds: float) -> str:
    """Make groups usable again after an answer spoiled them. Collective, over the store; returns what failed."""
    try:
        interruptible_group.renew_groups(seconds)
    except TimeoutError as error:
        return f"The process group is still spoiled: {error}."
    return ""


def make_anew(meeting: Meeting, backend: str) -> str:
    """Make the default group anew after it was destroyed on some rank. Collective; returns a note for the learner."""
    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.PrefixStore(f"made anew after {meeting.name}", meeting.store)
    dist.init_process_group(backend, store=store, rank=meeting.rank, world_size=meeting.size)
    return "The answer destroyed the process group. It was made anew: make your own groups and meshes again."


def as_text(thing: Any) -> str:
    """For facts that JSON does not hold."""
    return base64.b64encode(pickle.dumps(thing)).decode()


def from_text(text: str) -> Any:
    """What another rank has made into text with `as_text`."""
    return pickle.loads(base64.b64decode(text))
