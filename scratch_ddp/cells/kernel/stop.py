"""The Stop button: from the press to ranks that can run the next cell.

1. Jupyter's Stop is a SIGINT to the kernel. While a cell runs on ranks, `stop_button` makes an event of it.
2. `Interruption` sends an interrupt to the ranks of the cell, again and again until they have stopped or time is up.
   In the rank, `Rank.interrupt` (`rank/worker.py`) raises KeyboardInterrupt in the cell. This also ends a wait in a
   collective, because the process group is one that can be interrupted (`rank/interruptible_group.py`).
3. `recover` gives all ranks fresh process groups, and replaces ranks that have not stopped by new processes.

Ranks that wait for one that has raised, has died or has called another collective are freed in the same way. A cell
that fails without a Stop needs step 3 alone, and only if the ranks have not all made the same calls.
"""

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from scratch_ddp.cells.kernel.cluster import Cluster
from scratch_ddp.cells.kernel.rank_process import RankProcess
from scratch_ddp.cells.kernel.reader import Event
from scratch_ddp.cells.rank_lists import name_cells, name_ranks

_REPEAT_EVERY = 0.4  # seconds between two interrupts of a rank that goes on
_STOP_LIMIT = 2.0  # seconds from the first interrupt until a rank that has not stopped is replaced
_SLOW_STOP_LIMIT = 6.0  # the same for one that is known to be stopping, on a busy machine
_RENEW_LIMIT = 6.0  # seconds in which idle ranks must have renewed their process groups
_REPLACE_LIMIT = 10.0  # the same, if they have to wait for a rank that is being started (spawned: longer)


@contextlib.contextmanager
def stop_button(events: "queue.SimpleQueue[Event]", stop_after: float | None) -> Iterator[None]:
    """Turn SIGINT into a "stop" event, so that it can't interrupt our own code. So does the timer of --stop-after."""
    press = Event("stop", None)
    timer = threading.Timer(stop_after, lambda: events.put(press)) if stop_after is not None else None
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, lambda *_: events.put(press)) if in_main_thread else None
    try:
        if timer:
            timer.daemon = True
            timer.start()
        yield
    finally:
        if timer:
            timer.cancel()
        if in_main_thread:
            signal.signal(signal.SIGINT, before)


class Interruption:
    """Ends a cell on its ranks. It has begun when Stop was pressed, or when the ranks can't go on by themselves."""

    def __init__(self, cell: int):
        self._cell = cell
        self.pressed_at: float | None = None
        self.deadlocked_at: float | None = None
        self._sent_at = -1.0

    @property
    def begun(self) -> bool:
        return self.pressed_at is not None or self.deadlocked_at is not None

    def press(self, ranks: Collection[RankProcess]) -> None:
        """Somebody has pressed Stop. The second press says: do not wait any longer."""
        now = time.monotonic()
        if self.pressed_at is None:
            self.pressed_at = now
            self.send(ranks, now)
        else:
            self.pressed_at = now - _SLOW_STOP_LIMIT

    def send(self, ranks: Collection[RankProcess], now: float) -> None:
        """Interrupt the ranks, unless they were interrupted a moment ago."""
        if now - self._sent_at > _REPEAT_EVERY:
            self._sent_at = now
            for rank in ranks:
                rank.channel.send({"type": "interrupt", "cell": self._cell})

    def time_is_up(self, states: Collection[dict[str, Any]]) -> bool:
        """Whether the ranks have had enough time. `states`: where the ranks that still run are, as they reported it."""
        since = self.pressed_at or self.deadlocked_at
        if since is None:
            return False
        will_stop = all(state.get("stopping") or state.get("waits_in") for state in states)
        return time.monotonic() - since > (_SLOW_STOP_LIMIT if will_stop else _STOP_LIMIT)


def recover(cluster: Cluster, stuck: set[int]) -> list[str]:
    """Make a cluster ready for the next cell. `stuck`: ranks that have not stopped. Returns notes for the learner."""
    cluster.in_doubt = False
    return _replace(cluster, stuck) if stuck else _renew(cluster)


def _renew(cluster: Cluster) -> list[str]:
    """Fresh process groups on every rank."""
    cluster.generation += 1
    _ask_to_renew(cluster, cluster.ranks, _RENEW_LIMIT)
    silent, failed = _await_renewed(cluster, cluster.ranks, _RENEW_LIMIT + 0.5)
    if silent or failed:
        return _replace(cluster, silent or set(range(cluster.world_size)))
    return _groups_lost(cluster)


def _replace(cluster: Cluster, lost: set[int]) -> list[str]:
    """New processes for some ranks, whose variables are gone, and fresh process groups on the others."""
    for rank in lost:
        cluster.launcher.end(cluster.ranks[rank])
    for rank in lost:
        cluster.await_status(cluster.ranks[rank], 1.0)
    kept = [rank for rank in cluster.ranks if rank.rank not in lost]
    cluster.generation += 1
    if not kept:
        cluster.rendezvous, cluster.generation = cluster.rendezvous + 1, 0
    _ask_to_renew(cluster, kept, _REPLACE_LIMIT)
    before = {rank: cluster.ranks[rank] for rank in lost}
    cluster.start(lost, _REPLACE_LIMIT + 5)
    for rank in lost:
        cluster.ranks[rank].replaces(before[rank])
    if any(_await_renewed(cluster, kept, _REPLACE_LIMIT)):
        return _replace(cluster, set(range(cluster.world_size)))
    were, their = ("was", "its") if len(lost) == 1 else ("were", "their")
    cells = name_cells({number for rank in lost for number in cluster.ranks[rank].lost})
    return [
        f"{name_ranks(lost).capitalize()} could not be freed and {were} replaced: {their} variables are gone.",
        *([f"Run again on all ranks what is needed of {cells}."] if cells else []),
        *_groups_lost(cluster),
    ]


def _ask_to_renew(cluster: Cluster, ranks: Sequence[RankProcess], limit: float) -> None:
    for rank in ranks:
        rank.renewed = None
        rank.open_calls, rank.begun = [], {}
        rank.channel.send({"type": "renew", "generation": cluster.generation, "timeout": limit})


def _await_renewed(cluster: Cluster, ranks: Sequence[RankProcess], limit: float) -> tuple[set[int], set[int]]:
    """The ranks that have not answered, and those that could not renew their groups."""
    until = time.monotonic() + limit
    if any(rank.alive and rank.renewed is None for rank in ranks):
        for _ in cluster.receive(until):
            if not any(rank.alive and rank.renewed is None for rank in ranks):
                break
    silent = {rank.rank for rank in ranks if rank.renewed is None}
    return silent, {rank.rank for rank in ranks if rank.renewed and "error" in rank.renewed}


def _groups_lost(cluster: Cluster) -> list[str]:
    lost = any(rank.renewed and rank.renewed.get("retired") for rank in cluster.ranks)
    return ["Process groups and meshes made before must be made again."] if lost else []
