"""One cell on some ranks: from sending the code to the one exception that says what happened."""

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from scratch_ddp.cells.kernel.cluster import Cluster
from scratch_ddp.cells.kernel.presenter import Presenter, Screen, without_marks
from scratch_ddp.cells.kernel.rank_lists import name_ranks
from scratch_ddp.cells.kernel.rank_process import RankProcess
from scratch_ddp.cells.kernel.reader import Event, Pipe
from scratch_ddp.cells.kernel.reports import (
    RankError,
    RankInterrupt,
    Whereabouts,
    compose_rank_error,
    describe_death,
    describe_mismatch,
    describe_whereabouts,
    explain_sizes,
    is_consequence,
)
from scratch_ddp.cells.last_call import read_calls

_ASK_AFTER = 1.0  # seconds until ranks are asked where they are, and between two questions
_SAY_AFTER = 4.0  # seconds of waiting after which a line says where everybody is
_STUCK_AFTER = 2.0  # seconds that ranks may wait for one that has raised in this cell and can't come any more
_FREE_WITHIN = 2.0  # seconds from an interrupt until a rank that has not stopped is replaced
_SURELY_FREE_WITHIN = 6.0  # the same for one that is known to be about to stop, on a machine that is busy
_NUDGE_EVERY = 0.4  # seconds between two interrupts of a rank that goes on
_AFTER_A_DEATH = 0.25  # seconds for the others to see it themselves


class Execution:
    """Runs `code` on `ranks`. `number` is the notebook's number of the cell, for tracebacks and late output."""

    def __init__(self, cluster: Cluster, ranks: Sequence[int], code: str, cell: int, number: int, transient: bool):
        self.cluster, self.cell = cluster, cell
        self.ranks = {rank: cluster.ranks[rank] for rank in ranks}
        self.code, self.number = code, number
        self.screen = Screen(transient)
        self.presenter = Presenter(list(ranks), cluster.mark, self.screen)
        self.errors: dict[int, dict[str, Any]] = {}
        self.interrupted_in: dict[int, dict[str, Any]] = {}
        self.done: set[int] = set()
        self.where: dict[int, dict[str, Any]] = {}
        self.still_since: dict[int, float] = {}
        self.stopped_at: float | None = None  # when somebody pressed Stop
        self.freed_at: float | None = None  # when ranks were interrupted because one had failed
        self.died_at: float | None = None
        self.started = self.asked = self.heard = time.monotonic()
        self.nudged = 0.0

    def run(self, stop_after: float | None = None) -> None:
        """Returns when every rank is through. Raises RankError or RankInterrupt if one raised, died or was stopped."""
        with _stop_button(self.cluster.events, stop_after):
            self._send()
            for event in self.cluster.receive(until=float("inf"), pause=0.1):
                self._take(event)
                self.presenter.update()
                if self._finished() or self._given_up():
                    break
                self._look_after(time.monotonic())
            self.presenter.finish()
            self._conclude()

    def _send(self) -> None:
        for rank in self.ranks.values():
            files = self.cluster.launcher.open_pipes(rank, self.cell)
            message = {"type": "execute", "cell": self.cell, "number": self.number, "code": self.code}
            rank.last_words = []
            rank.send(message, files)
            for file in files:
                os.close(file)

    # What arrives

    def _take(self, event: Event) -> None:
        if event.kind == "stop":
            self._on_stop()
        elif event.kind == "text" and isinstance(event.source, Pipe):
            rank = event.source.rank.rank
            if event.source.cell == self.cell and rank not in self.done:
                self.heard = time.monotonic()
                self.presenter.transcripts[rank].read(event.source.stream, event.value)
            else:
                self.cluster.keep_late(event)
        elif isinstance(event.source, RankProcess):
            if event.kind == "gone" or not event.source.alive:
                self.died_at = self.died_at or time.monotonic()
            elif event.value.get("cell") == self.cell:
                self._take_message(event.source.rank, event.value)
            else:
                self.cluster.keep_late(event)

    def _take_message(self, rank: int, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "display":
            self.presenter.transcripts[rank].place(message["place"], message)
        elif kind == "done":
            self.done.add(rank)
            self.presenter.close(rank)
            if message["error"]:
                self.errors[rank] = message["error"]
            if message["interrupted_in"]:
                self.interrupted_in[rank] = message["interrupted_in"]
        elif kind == "whereabouts":
            if message["waits_in"] is None or message["waits_in"] != self.where.get(rank, {}).get("waits_in"):
                self.still_since[rank] = time.monotonic()
            self.where[rank] = message

    def _running(self) -> list[int]:
        return [rank for rank, process in self.ranks.items() if rank not in self.done and process.alive]

    def _finished(self) -> bool:
        if self.died_at is not None and self._running():
            return time.monotonic() - self.died_at > 2 * _AFTER_A_DEATH
        return not self._running()

    def _given_up(self) -> bool:
        since = self.stopped_at or self.freed_at
        if since is None:
            return False
        where = [self.where.get(rank, {}) for rank in self._running()]
        surely = all(each.get("stopping") or each.get("waits_in") for each in where)
        return time.monotonic() - since > (_SURELY_FREE_WITHIN if surely else _FREE_WITHIN)

    # What is done meanwhile

    def _look_after(self, now: float) -> None:
        running = self._running()
        if now - self.asked > (_NUDGE_EVERY if self.stopped_at or self.freed_at else _ASK_AFTER):
            self.asked = now
            for rank in running:
                self.ranks[rank].send({"type": "where", "cell": self.cell})
        if now - max(self.started, self.heard) > _SAY_AFTER:
            self.screen.pass_by(f" ⏳ {describe_whereabouts(self._whereabouts())}")
        if self.freed_at is None and self.stopped_at is None and self._stuck(running, now):
            self.freed_at = now
        dead_long_enough = self.died_at is not None and now - self.died_at > _AFTER_A_DEATH
        if (self.stopped_at or self.freed_at or dead_long_enough) and now - self.nudged > _NUDGE_EVERY:
            self._interrupt(now)

    def _stuck(self, running: list[int], now: float) -> bool:
        """Whether all that still run have long waited for a rank that has raised, or that has called something else."""
        if not all(
            self.where.get(rank, {}).get("waits_in") and now - self.still_since[rank] > _STUCK_AFTER for rank in running
        ):
            return False
        return bool(self.errors) or bool(describe_mismatch(self._whereabouts()))

    def _on_stop(self) -> None:
        now = time.monotonic()
        if self.stopped_at is None:
            self.stopped_at = now
            self._interrupt(now)
        else:  # pressed again: do not wait any longer
            self.stopped_at = now - _SURELY_FREE_WITHIN

    def _interrupt(self, now: float) -> None:
        self.nudged = now
        for rank in self._running():
            self.ranks[rank].send({"type": "interrupt", "cell": self.cell})

    # How it ended

    def _whereabouts(self) -> dict[int, Whereabouts]:
        whereabouts = {rank: self._whereabouts_of(rank) for rank in range(self.cluster.world_size)}
        for rank, process in self.ranks.items():
            whereabouts[rank].calls = read_calls(process.folder, rank)
        return whereabouts

    def _whereabouts_of(self, rank: int) -> Whereabouts:
        known = self.interrupted_in.get(rank) or self.where.get(rank, {})
        if rank not in self.ranks:
            return Whereabouts("absent")
        if not self.ranks[rank].alive:
            return Whereabouts("died")
        if rank in self.done and rank not in self.interrupted_in:
            return Whereabouts("raised" if rank in self.errors else "finished")
        return Whereabouts("runs", known.get("line"), known.get("waits_in"))

    def _conclude(self) -> None:
        dead = [process.rank for process in self.cluster.ranks if not process.alive]  # also those not in this cell
        if dead:
            raise self._death(dead)
        if self.stopped_at is None and self.freed_at is None:
            if self.errors:
                raise compose_rank_error(self.errors, [])
            return
        told = describe_whereabouts(self._whereabouts())
        stuck = set(self._running())
        notes = self.cluster.replace(stuck) if stuck else self.cluster.renew()
        own = {rank: error for rank, error in self.errors.items() if rank not in self.interrupted_in}
        if self.freed_at is not None and own:
            raise compose_rank_error(own, [f"The others could not go on and were stopped: {told}.", *notes])
        if self.freed_at is not None:
            raise RankError("\n".join([f"{told}. They waited for each other and were stopped.", *notes]))
        lost = any("variables are gone" in note for note in notes)
        kept = "The next cell works." if lost else "All variables are kept; the next cell works."
        raise RankInterrupt("\n".join([f"stopped: {told}.", kept, *notes]))

    def _death(self, dead: list[int]) -> RankError:
        for rank in dead:
            self.cluster.await_status(self.cluster.ranks[rank])
            self.cluster.dead[rank] = describe_death(self.cluster.ranks[rank])
        lines = []
        for rank in dead:
            words = [line for line in self.cluster.ranks[rank].last_words if line.strip()]
            if words:
                lines += [f"── last output of rank {rank} ──", *words, ""]
        errors = {
            rank: error
            for rank, error in self.errors.items()
            if rank not in self.interrupted_in and not is_consequence(error)
        }
        message = "; ".join(self.cluster.dead[rank] for rank in dead) + "."
        message += explain_sizes(self.cluster.ranks, dead)
        message += "\nThis cluster runs no more cells: %dist_init starts a new one."
        if not errors:
            return RankError(message, lines)
        others = compose_rank_error(errors, [])
        return RankError(f"{message}\n{others}", [*lines, *others.lines])


@contextlib.contextmanager
def _stop_button(events: "queue.SimpleQueue[Event]", stop_after: float | None) -> Iterator[None]:
    """Turn SIGINT (Jupyter's Stop) into an event, so that it can't fall between two lines of ours."""
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


def show_late(cluster: Cluster, numbers: dict[int, int], screen: Screen) -> None:
    """Show text that ranks wrote after their cell had ended, and say which cell it was."""
    sayers: dict[tuple[int, str], list[int]] = {}
    for (cell, rank), chunks in sorted(cluster.late.items()):
        sayers.setdefault((cell, without_marks(b"".join(chunks), cluster.mark).rstrip()), []).append(rank)
    for (cell, said), ranks in sayers.items():
        if said.strip():
            screen.note(f"(late output of {name_ranks(ranks)} from cell [{numbers.get(cell, '?')}])\n{said}")
    cluster.late.clear()
