"""Facts exchanged among all ranks over the store: it goes on working when the process group is stuck or spoiled."""

import contextlib
import json
import time
import uuid
import weakref
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from scratch_ddp.cells.rank import interruptible_group

_consumed: dict[int, str] = {}  # by rank: the last arrival that a meeting of this process has used


class RanksMissing(TimeoutError):
    """Some ranks did not come in time; `missing` names them."""

    def __init__(self, missing: list[int], seconds: float):
        self.missing, self.seconds = missing, seconds
        super().__init__(f"ranks {missing} did not come within {seconds:g} s")


class Meeting:
    """All ranks of the default group, until `close`. Collective; raises RanksMissing after `seconds`.

    Ranks may come to meetings unequally often (a cell that ran on some ranks only). So a meeting is not numbered but
    named by its arrivals: each rank leaves a fresh token, and takes it away when it gives up or goes.
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

        def all_here() -> list[int]:
            for rank in range(self.size):
                if rank not in tokens and self.store.check([self._arrival(rank)]):
                    token = self.store.get(self._arrival(rank)).decode()
                    if token != "gone" and token != _consumed.get(rank):
                        tokens[rank] = token
            return [rank for rank in range(self.size) if rank not in tokens]

        _wait_until_none(all_here, seconds)
        _consumed.update(tokens)
        return ".".join(tokens[rank] for rank in range(self.size))

    def exchange(self, fact: Any, seconds: float) -> list[Any]:
        """Return every rank's fact, in rank order. Facts are JSON. Raises RanksMissing after `seconds`."""
        self._exchanges += 1
        keys = [f"exercises: {self.name}/{self._exchanges}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], json.dumps(fact))
        _wait_until_none(lambda: [rank for rank, key in enumerate(keys) if not self.store.check([key])], seconds)
        return [json.loads(self.store.get(key)) for key in keys]

    def close(self) -> None:
        self.store.set(self._arrival(self.rank), "gone")


def _wait_until_none(missing: Any, seconds: float) -> None:
    """Poll in Python, where an interrupt is seen at once; the store's own wait is not interruptible."""
    deadline, pause = time.monotonic() + seconds, 0.0005
    while left := missing():
        if time.monotonic() > deadline:
            raise RanksMissing(left, seconds)
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)


# FOLDED: Keep the default process group usable whatever an answer does in it.
#
# An answer is checked in the default group, since learners forget `group`. Only a watched group (that of rank cells) lets
# go of a rank that waits in it. So where the default group is another one, a watched twin stands in for it meanwhile.

_twins: "weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]" = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def interruptible_default_group() -> Iterator[None]:
    """Inside, the default group is one that a signal can interrupt. Collective.

    Groups and meshes made before stay what they are: in those, plain gloo or NCCL is not bounded.
    """
    default = dist.group.WORLD
    if dist.get_backend() == interruptible_group.BACKEND:
        yield
        return
    if default not in _twins:
        _twins[default] = dist.new_group(backend=interruptible_group.BACKEND)
    dist.distributed_c10d._update_default_pg(_twins[default])
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
    """Make the default group again after it was destroyed on some rank. Collective; returns what to say."""
    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.PrefixStore(f"made anew after {meeting.name}", meeting.store)
    dist.init_process_group(backend, store=store, rank=meeting.rank, world_size=meeting.size)
    return "The answer destroyed the process group. It was made anew: make your own groups and meshes again."
