"""One cell on some ranks: from sending the code to the one exception that says what happened."""

import time
from collections.abc import Sequence
from typing import Any

from scratch_ddp.cells.kernel import diagnosis
from scratch_ddp.cells.kernel.cluster import Cluster
from scratch_ddp.cells.kernel.output import CellOutput, NotebookOutput
from scratch_ddp.cells.kernel.placement import INTERRUPTIBLE
from scratch_ddp.cells.kernel.rank_process import RankInCell, RankProcess
from scratch_ddp.cells.kernel.reader import Event
from scratch_ddp.cells.kernel.stop import Interruption, ranks_behind, recover, stop_button
from scratch_ddp.cells.words import RankError, RankInterrupt

_ASK_AFTER = 1.0  # seconds until ranks are asked where they are, and between two questions
_ASK_AGAIN_AFTER = 0.4  # the same while they are being interrupted
_SAY_AFTER = 4.0  # seconds without output after which a line says where each rank is
_PRESS_AGAIN_AFTER = 5.0  # seconds until --stop-after ends what handles its first interrupt
_AFTER_A_DEATH = 0.25  # seconds for the others to notice it by themselves


class Execution:
    """Runs `code` on `ranks`. `number` is the notebook's number of the cell, for tracebacks and late output."""

    def __init__(
        self, cluster: Cluster, ranks: Sequence[int], code: str, cell: int, number: int, notebook: NotebookOutput
    ):
        self.cluster, self.cell = cluster, cell
        self.ranks = {rank.rank: RankInCell(rank, rank.rank in ranks) for rank in cluster.ranks}
        self.code, self.number = code, number
        self.notebook = notebook
        self.output = CellOutput(ranks, cluster.mark, notebook)
        self.interruption = Interruption(cell)
        self.died_at: float | None = None
        self.started = self.asked = self.heard = time.monotonic()

    def run(self, stop_after: float | None = None) -> None:
        """Returns when every rank is done. Raises RankError or RankInterrupt if one raised, died or was stopped."""
        self.press_at = self.started + (float("inf") if stop_after is None else stop_after)
        with stop_button(self.cluster.events):
            for rank in [rank.process for rank in self._running()]:
                rank.begin_cell(self.cell)
                message = {"type": "execute", "cell": self.cell, "number": self.number, "code": self.code}
                rank.launcher.execute(rank, message)
            self._follow()
            self.output.finish()
            self._conclude()
            for note in diagnosis.describe_open_calls({rank.rank: rank.place for rank in self.cluster.ranks}):
                self.notebook.note(note)

    def _follow(self) -> None:
        """Take what arrives until every rank is done, has died, or has been given enough time to stop."""
        for event in self.cluster.receive(until=float("inf"), pause=0.05):
            self._take(event)
            self.output.update()
            if self._finished() or self.interruption.time_is_up(self._running()):
                return
            now = time.monotonic()
            if now > self.press_at:
                self.press_at = now + _PRESS_AGAIN_AFTER
                self._press()
            self._look_after(now)

    # What arrives

    def _take(self, event: Event) -> None:
        if event.kind == "stop":
            self._press()
        elif event.kind == "text":
            if event.source.cell == event.source.rank.running == self.cell:
                self.heard = time.monotonic()
                self.output.of_rank[event.source.rank.rank].read(event.value)
        elif event.source in self.cluster.ranks:  # the end of an earlier cluster's rank may be heard of late
            if event.kind == "gone" or not event.source.alive:
                self.died_at = self.died_at or time.monotonic()
            elif event.value.get("cell") == self.cell:
                self._take_message(event.source.rank, event.value)

    def _take_message(self, rank: int, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "place" and self.interruption.agreement is not None:
            self.interruption.agreement.note(rank, message)
        elif kind in ("state", "done") and not self.ranks[rank].done:
            self.ranks[rank].note(message)

    def _running(self) -> list[RankInCell]:
        return [rank for rank in self.ranks.values() if rank.running]

    def _press(self) -> None:
        running = self._running()
        others = {number: rank.process.place for number, rank in self.ranks.items() if not rank.running}
        self.interruption.press(running, others if self.cluster.placement.backend == INTERRUPTIBLE else None)

    def _finished(self) -> bool:
        if self.died_at is not None and self._running():
            return time.monotonic() - self.died_at > 2 * _AFTER_A_DEATH
        return not self._running()

    # Meanwhile

    def _look_after(self, now: float) -> None:
        """Ask ranks where they are, tell the learner, and interrupt ranks that can't go on."""
        if now - self.asked > (_ASK_AGAIN_AFTER if self.interruption.begun else _ASK_AFTER):
            self.asked = now
            for rank in self._running():
                rank.process.channel.send({"type": "query_state", "cell": self.cell})
        if now - max(self.started, self.heard) > _SAY_AFTER:
            press = ". Press ■ to stop" if diagnosis.stuck_ranks(self.ranks) else ""
            if self.interruption.handled_by(self._running()):
                press = ", after the Stop. Press ■ again to end that too"
            self.notebook.show_passing(f" ⏳ {diagnosis.describe_states(self.ranks)}{press}")
        at_work = not self.interruption.begun or self.interruption.handled_by(self._running())
        dead_long_enough = self.died_at is not None and now - self.died_at > _AFTER_A_DEATH
        if at_work and (dead_long_enough or self._deadlocked()):
            self.interruption.interrupt(now, deadlocked=not dead_long_enough)
        self.interruption.go_on(self._running())

    def _deadlocked(self) -> bool:
        """Whether none can go on, because a rank has raised, or because ranks have called different things."""
        running = self._running()
        if not all(rank.waits_for_long() for rank in running) or len(diagnosis.stuck_ranks(self.ranks)) < len(running):
            return False
        return bool(self.errors or diagnosis.describe_mismatch(self.ranks))

    @property
    def errors(self) -> dict[int, dict[str, Any]]:
        """What ranks have raised."""
        return {number: rank.error for number, rank in self.ranks.items() if rank.error}

    def _own_errors(self) -> dict[int, dict[str, Any]]:
        """Without those of ranks that were interrupted."""
        return {number: error for number, error in self.errors.items() if not self.ranks[number].interrupted_in}

    # How it ended

    def _conclude(self) -> None:
        dead = [process for process in self.cluster.ranks if not process.alive]  # also those not in this cell
        if dead:
            raise self._death(dead)
        if not self.interruption.begun:
            if self.errors:
                raise diagnosis.compose_rank_error(self.errors, self._settle())
            return
        where, stuck = diagnosis.describe_states(self.ranks), {rank.process.rank for rank in self._running()}
        interrupted = [rank for rank in self.ranks.values() if rank.interrupted_in]
        waited = [rank for rank in interrupted if rank.waits_in]  # their connections were ended
        together = self.interruption.together and not stuck and not waited
        notes = self._settle() if together else recover(self.cluster, stuck)
        if not stuck and not self.errors:  # every rank has handled it
            for note in notes:
                self.notebook.note(note)
            return
        if self.interruption.late and len(waited) < len(interrupted):
            notes = ["They did not stop at the same call: what should be equal on all ranks may differ.", *notes]
        if own := self._own_errors():
            others = [f"The others were stopped: {where}."] if stuck or interrupted else []
            raise diagnosis.compose_rank_error(own, [*others, *notes])
        if self.interruption.deadlocked:
            raise RankError("\n".join([f"{where}. They waited for each other and were stopped.", *notes]))
        lost = any("variables are gone" in note for note in notes)
        kept = "The next cell works." if lost else "All variables are kept; the next cell works."
        raise RankInterrupt("\n".join([f"stopped: {where}.", kept, *notes]))

    def _settle(self) -> list[str]:
        """Renew process groups in which the failed cell has left calls open or begun unequally often, and say so."""
        if not any(rank.calls() for rank in self.ranks.values()):
            return []  # what may be open was so before
        places = self.cluster.ask(range(self.cluster.world_size), {"kind": "calls"}, 1.0)
        for rank, place in places.items():
            self.cluster.ranks[rank].place = place
        if not ranks_behind(places) and not any(place["open"] for place in places.values()):
            return []
        said = "The ranks had not all made the same calls, so their process groups were renewed"
        return [f"{said}; what was under way is lost.", *recover(self.cluster, set())]

    def _death(self, dead: list[RankProcess]) -> RankError:
        lines = []
        for process in dead:
            self.cluster.await_status(process)
            self.cluster.dead[process.rank] = process.describe_death()
            last = [line for line in process.last_lines(self.cluster.mark) if line.strip()]
            if last:
                lines += [f"── last output of rank {process.rank} ──", *last, ""]
        message = "; ".join(self.cluster.dead[process.rank] for process in dead) + "."
        message += "\nThis cluster runs no more cells: %dist_init starts a new one."
        errors = {rank: error for rank, error in self._own_errors().items() if not diagnosis.is_consequence(error)}
        if not errors:
            return RankError(message, lines)
        others = diagnosis.compose_rank_error(errors, [])
        return RankError(f"{message}\n{others}", [*lines, *others.lines])
