"""The Stop button: from the press to ranks that can run the next cell.

1. Jupyter's Stop is a SIGINT to the kernel. While a cell runs on ranks, `stop_button` makes an event of it.
2. `Interruption` lets the ranks agree where they leave (`Agreement`): after the same calls, so that a training loop
   ends in the same step everywhere, and all process groups go on working. If they can't, or not in time, each is
   interrupted where it is. In the rank, `Interrupts` (`rank/stop.py`) raises KeyboardInterrupt in the cell. As soon as
   all ranks know of it they end the connections of their process groups, and with them all waits in collectives.
3. What the learner's code does with the KeyboardInterrupt is its own affair, as in any Python: it may save the model.
   A second press ends that too.
4. `recover` gives all ranks fresh process groups, if they have not all made the same calls, and replaces ranks that
   have not noticed the interrupt by new processes.

Ranks that wait for one that has raised, has died or has called another collective are freed in the same way. A cell
that fails without a Stop needs step 4 alone.
"""

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from scratch_ddp.cells.flight_recorder import IN_THIS_CELL
from scratch_ddp.cells.kernel.cluster import Cluster
from scratch_ddp.cells.kernel.rank_process import RankInCell, RankProcess
from scratch_ddp.cells.kernel.reader import Event
from scratch_ddp.cells.words import name_ranks

_ASK_AGAIN_AFTER = 0.03  # seconds between two questions how far a rank has come
_GRACE, _LONGEST_GRACE = 1.0, 5.0  # seconds in which ranks must have agreed where they leave
_REPEAT_EVERY = 0.4  # seconds between two interrupts of a rank that goes on
_STOP_LIMIT = 2.0  # seconds from an interrupt until a rank that has not noticed it is replaced
_SLOW_STOP_LIMIT = 6.0  # the same for one that is known to be stopping, on a busy machine
_RENEW_LIMIT = 6.0  # seconds in which idle ranks must have renewed their process groups
_REPLACE_LIMIT = 10.0  # the same, if they have to wait for a rank that is being started (spawned: longer)


@contextlib.contextmanager
def stop_button(events: "queue.SimpleQueue[Event]") -> Iterator[None]:
    """Turn SIGINT into a "stop" event, so that it can't interrupt our own code."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, lambda *_: events.put(Event("stop", None))) if in_main_thread else None
    try:
        yield
    finally:
        if in_main_thread:
            signal.signal(signal.SIGINT, before)


class Agreement:
    """Where ranks leave a cell together. Each says how far it has come (its "place": see `Interrupts.hold`).

    No call may lack any of its ranks then. And all must have made equally many collectives in this cell, whatever their
    groups, so that ranks that run one program leave at the same line of it.

    `others`: the places of ranks that no longer run in the cell, or never did.
    """

    def __init__(self, running: Collection[RankProcess], others: dict[int, dict[str, Any]], now: float):
        self.running, self._others = {rank.rank: rank for rank in running}, others
        self._places: dict[int, dict[str, Any]] = {}
        self._since, self._moved_at, self._asked_at = now, now, -1.0
        self._until: dict[str, int] = {}  # how often each call was made on the rank that has come furthest

    def note(self, rank: int, place: dict[str, Any]) -> None:
        """A rank has said how far it has come."""
        place["members"][IN_THIS_CELL] = list(self.running)
        self._places[rank] = place
        until = furthest(self._places.values())
        if until != self._until:
            self._until, self._asked_at, self._moved_at = until, -1.0, time.monotonic()

    def ask(self, cell: int, now: float) -> None:
        """Ask ranks to hold; those that do not yet, again and again."""
        if now - self._asked_at > _ASK_AGAIN_AFTER:
            everybody, self._asked_at = self._asked_at < 0, now
            members = members_of(self._places.values())
            for number, rank in self.running.items():
                if everybody or not self._places.get(number, {}).get("held"):
                    until = {key: count for key, count in self._until.items() if number in members[key]}
                    rank.channel.send({"type": "hold", "cell": cell, "until": until})

    def behind(self) -> set[int]:
        return ranks_behind(self._others | self._places)

    def reached(self) -> bool:
        """Whether all ranks hold after the same calls, or have made none in this cell."""
        places = self._places.values()
        if len(places) < len(self.running):
            return False
        return not any(place["calls"] for place in places) or (
            all(place["held"] for place in places) and not self.behind()
        )

    def given_up(self, now: float) -> bool:
        """Whether they can't, because a rank that has left the cell lacks a call, or have not in time.

        The time is that of two steps, as far as it can be told from the time between two calls. While ranks come
        further it is twice as long.
        """
        if not self.behind() <= set(self.running):
            return True
        steps = 2 * max((place["gap"] for place in self._places.values()), default=0.0)
        waited = max(now - self._moved_at, (now - self._since) / 2)
        return waited > min(max(_GRACE, steps), _LONGEST_GRACE)


class Interruption:
    """Ends a cell on its ranks. It has begun when Stop was pressed, or when the ranks can't go on by themselves."""

    def __init__(self, cell: int):
        self._cell = cell
        self.agreement: Agreement | None = None  # while the ranks try to find where they leave together
        self.together = False  # whether they have
        self.late = False  # whether there was no time for it
        self.number = 0  # of the last interrupt that ranks were sent
        self.deadlocked = False
        self._since = self._pressed = 0.0  # when the last interrupt was asked for, and when Stop was last pressed
        self._forced = False  # handlers in the learner's code are interrupted too
        self._sent_at = -1.0
        self._asked_at, self._end = 0.0, False  # whether connections may end: all ranks know of the interrupt

    @property
    def begun(self) -> bool:
        return self.agreement is not None or self.number > 0

    def press(self, running: Collection[RankInCell], others: dict[int, dict[str, Any]] | None) -> None:
        """Somebody has pressed Stop. `others`: see `Agreement`; None if these ranks can't agree.

        The second press says: do not wait any longer. The third: replace what still runs.
        """
        now = time.monotonic()
        before, self._pressed = self._pressed, now
        if not self.begun and others is not None:
            self._since, self.agreement = now, Agreement([rank.process for rank in running], others, now)
            self.agreement.ask(self._cell, now)
        elif not self._forced:
            self._forced = self.number > 0
            self.interrupt(now)
        elif now - max(self._since, before) > _GRACE:  # not one of several presses in a row
            self._since = now - _SLOW_STOP_LIMIT

    def interrupt(self, now: float, together: bool = False, deadlocked: bool = False) -> None:
        """From now on ranks are interrupted, unless they have noticed it already."""
        self._since = max(self._since, now - _GRACE) if self.agreement else now
        self.agreement, self.together, self.deadlocked = None, together, deadlocked
        self.number += 1
        self._sent_at, self._asked_at, self._end = -1.0, now, False

    def go_on(self, running: Collection[RankInCell]) -> None:
        """Do what is due."""
        now = time.monotonic()
        if self.agreement is not None:
            gone = self.agreement.running.keys() - {rank.process.rank for rank in running}
            if self.agreement.reached() and not gone:
                self.interrupt(now, together=True)
            elif gone or self.agreement.given_up(now):
                self.late = not gone and self.agreement.behind() <= set(self.agreement.running)
                self.interrupt(now)
            else:
                self.agreement.ask(self._cell, now)
        know = all(rank.said.get("asked", 0) >= self.number for rank in running) or now - self._asked_at > _REPEAT_EVERY
        if self.number and (now - self._sent_at > _REPEAT_EVERY or (know and not self._end)):
            self._sent_at, self._end = now, know
            for rank in running:
                if not self._noticed(rank):
                    interrupt = {"type": "interrupt", "cell": self._cell, "number": self.number}
                    rank.process.channel.send(interrupt | {"together": self.together, "end": self._end})

    def _noticed(self, rank: RankInCell) -> bool:
        return rank.said.get("caught", 0) >= self.number

    def handled_by(self, running: Collection[RankInCell]) -> bool:
        """Whether all these ranks have got their KeyboardInterrupt, and go on in the learner's code."""
        return bool(self.number) and all(self._noticed(rank) and not rank.said.get("stopping") for rank in running)

    def time_is_up(self, running: Collection[RankInCell]) -> bool:
        """Whether ranks have had enough time. They are then replaced; those that handle the interrupt are not."""
        if not self.number or (self.handled_by(running) and not self._forced):
            return False
        will_stop = all(rank.said.get("stopping") or rank.said.get("waits_in") for rank in running)
        if time.monotonic() - self._since < (_SLOW_STOP_LIMIT if will_stop else _STOP_LIMIT):
            return False
        if self._forced or not any(map(self._noticed, running)):
            return True
        self._forced = True  # those that handle it may wait for one that does not notice it
        self.interrupt(time.monotonic())
        return False


def furthest(places: Iterable[dict[str, Any]]) -> dict[str, int]:
    """How often each call was made on the rank that has come furthest (see `interruptible_group.place`)."""
    found: dict[str, int] = {}
    for place in places:
        for key, count in place["begun"].items():
            found[key] = max(count, found.get(key, 0))
    return found


def members_of(places: Iterable[dict[str, Any]]) -> dict[str, list[int]]:
    """The ranks that count each call."""
    return {key: ranks for place in places for key, ranks in place["members"].items()}


def ranks_behind(places: dict[int, dict[str, Any]]) -> set[int]:
    """The ranks that have not made all the calls which others have made with them."""
    until = furthest(places.values())
    members = members_of(places.values())
    begun = {rank: place["begun"] for rank, place in places.items()}
    return {rank for key in members for rank in members[key] if begun.get(rank, {}).get(key, 0) < until.get(key, 0)}


def recover(cluster: Cluster, stuck: set[int]) -> list[str]:
    """Make a cluster ready for the next cell: fresh process groups on all ranks. Returns notes for the learner.

    `stuck`: ranks that have not stopped. They become new processes, without their variables; so do those that can't
    renew their groups.
    """
    for rank in stuck:
        cluster.ranks[rank].launcher.end(cluster.ranks[rank])
    for rank in stuck:
        cluster.await_status(cluster.ranks[rank], 1.0)
    kept = [rank for rank in cluster.ranks if rank.rank not in stuck]
    cluster.generation += 1
    limit = _REPLACE_LIMIT if stuck else _RENEW_LIMIT
    for rank in kept:
        rank.renewed = None
        rank.place = {"open": [], "begun": {}, "members": {}}
        rank.channel.send({"type": "renew", "generation": cluster.generation, "timeout": limit})
    if stuck:
        cluster.start(stuck, limit + 5)
    events = cluster.receive(time.monotonic() + limit + 0.5)
    while any(rank.alive and rank.renewed is None for rank in kept) and next(events, None):
        pass
    silent = {rank.rank for rank in kept if rank.renewed is None}
    if silent or any("error" in rank.renewed for rank in kept):
        return recover(cluster, silent if silent and not stuck else set(range(cluster.world_size)))
    notes = []
    if stuck:
        were, their = ("was", "its") if len(stuck) == 1 else ("were", "their")
        notes = [
            f"{name_ranks(stuck).capitalize()} could not be freed and {were} replaced: {their} variables are gone.",
            "Run again on all ranks the cells whose variables are needed.",
        ]
    if any(rank.renewed.get("retired") for rank in kept):
        notes.append("Process groups and meshes made before must be made again.")
    return notes
