"""The ranks of one notebook: start them, run cells on them, interrupt, renew, replace and end them."""

import contextlib
import queue
import time
from collections.abc import Callable, Sequence

from scratch_ddp.cells.kernel.placement import Placement
from scratch_ddp.cells.kernel.rank_lists import name_ranks
from scratch_ddp.cells.kernel.rank_process import LauncherProcess, RankProcess, base_config, config_of
from scratch_ddp.cells.kernel.reader import Event, Pipe
from scratch_ddp.cells.kernel.reports import ClusterError, describe_death

_START_LIMIT = 120.0  # seconds until a rank must have answered for the first time
_RENEW_LIMIT = 6.0  # seconds in which ranks that stand idle must have renewed their process groups
_REPLACE_LIMIT = 10.0  # the same, if they have to wait for a rank that is being started (spawned: longer)


class Cluster:
    """`world_size` ranks. Events of all ranks come in through `events` (see `reader`)."""

    def __init__(self, launcher: LauncherProcess, events: "queue.SimpleQueue[Event]", placement: Placement):
        self.launcher, self.events, self.placement = launcher, events, placement
        self.world_size = len(placement.gpus)
        self.folder = launcher.root / f"cluster {time.monotonic_ns()}"
        self.folder.mkdir()
        self.base = base_config(self.folder, self.world_size, placement.backend)
        self.generation = 0
        self.meeting = 0  # counts the files by which ranks find each other: a new one when all are new
        self.dead: dict[int, str] = {}  # rank → how it ended; such a cluster runs no more cells
        self.late: dict[tuple[int, int], list[bytes]] = {}  # (cell, rank) → text that came after its cell had ended
        self.ranks = [self._start(rank) for rank in range(self.world_size)]
        self._await_hello(self.ranks)

    @property
    def mark(self) -> bytes:
        return self.base["mark"].encode()

    # Start

    def _start(self, rank: int) -> RankProcess:
        base = self.base | {"generation": self.generation, "meeting": self.meeting}
        return self.launcher.start(config_of(base, rank, self.placement.gpus[rank]), self.folder)

    def _await_hello(self, expected: Sequence[RankProcess], limit: float = _START_LIMIT) -> None:
        """Wait until every rank has its process group and shell. Raises ClusterError, saying why one has not."""
        missing = {rank.rank for rank in expected}
        try:
            for event in self.receive(until=time.monotonic() + limit):
                if event.kind == "message" and event.value["type"] == "hello" and event.source in expected:
                    missing.discard(event.source.rank)
                    event.source.device = event.value["device"]
                if not missing:
                    return
                ended = [rank for rank in expected if rank.status is not None]
                if ended:
                    words = "\n".join(ended[0].last_words).strip()
                    raise ClusterError(f"rank {ended[0].rank} {ended[0].how_it_ended()} while it started:\n{words}")
            raise ClusterError(f"{name_ranks(missing)} did not answer within {limit:g} s of the start.")
        except BaseException:
            self.shutdown()
            raise

    # Events

    def receive(self, until: float, pause: float = 0.5):
        """Events as they arrive, with what concerns the ranks' lives already noted; a "tick" at least every `pause`."""
        while (left := until - time.monotonic()) > 0:
            try:
                event = self.events.get(timeout=min(left, pause))
            except queue.Empty:
                yield Event("tick", None)
                continue
            self.note(event)
            yield event

    def note(self, event: Event) -> None:
        """Keep the books: pids, exit codes, closed links, last words, late text."""
        if event.kind == "text":
            event.source.rank.remember_words(event.source.cell, event.value.decode(errors="replace"))
        elif event.kind == "gone" and isinstance(event.source, RankProcess):
            event.source.gone = True
        elif event.kind == "message" and event.value["type"] == "started":
            self.ranks[event.value["rank"]].pid = event.value["pid"]
        elif event.kind == "message" and event.value["type"] == "renewed":
            event.source.renewed = event.value
        elif event.kind == "message" and event.value["type"] == "ended":
            for rank in self.ranks:
                if rank.pid == event.value["pid"]:
                    rank.status = event.value["status"]

    def settle(self) -> None:
        """Take note of all that happened since the last cell."""
        with contextlib.suppress(queue.Empty):
            while True:
                event = self.events.get_nowait()
                self.note(event)
                self.keep_late(event)
        for rank in self.ranks:
            if not rank.alive and rank.rank not in self.dead:
                self.await_status(rank)
                self.dead[rank.rank] = describe_death(rank)

    def keep_late(self, event: Event) -> None:
        """Text that belongs to no running cell is kept for the next one, with the cell that it came from."""
        if event.kind == "text" and isinstance(event.source, Pipe) and event.source.cell > 0:
            self.late.setdefault((event.source.cell, event.source.rank.rank), []).append(event.value)
        elif event.kind == "message" and event.value["type"] == "display" and event.source in self.ranks:
            kinds = ", ".join(event.value["data"])
            self.late.setdefault((event.value["cell"], event.source.rank), []).append(f"<{kinds}>\n".encode())

    def await_status(self, rank: RankProcess, limit: float = 0.5) -> None:
        """A closed link comes before the exit code: wait for the latter."""
        until = time.monotonic() + limit
        while rank.status is None and not rank.launcher_lost and (left := until - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                event = self.events.get(timeout=left)
                self.note(event)
                self.keep_late(event)

    # After an interrupt

    def renew(self) -> list[str]:
        """Fresh process groups on every rank. Returns what has to be said to the learner about it."""
        self.generation += 1
        self._ask_to_renew(self.ranks, _RENEW_LIMIT)
        silent, failed = self._await_renewed(self.ranks, _RENEW_LIMIT + 0.5)
        if silent or failed:
            return self.replace(silent or set(range(self.world_size)))
        return self._groups_lost()

    def replace(self, lost: set[int]) -> list[str]:
        """New processes for ranks that can't be freed. Their variables are gone, and the message says so."""
        for rank in lost:
            self.launcher.end(self.ranks[rank])
        for rank in lost:
            self.await_status(self.ranks[rank], 1.0)
        kept = [rank for rank in self.ranks if rank.rank not in lost]
        self.generation += 1
        if not kept:
            self.meeting, self.generation = self.meeting + 1, 0
        self._ask_to_renew(kept, _REPLACE_LIMIT)
        for rank in lost:
            self.ranks[rank] = self._start(rank)
        self._await_hello([self.ranks[rank] for rank in lost], _REPLACE_LIMIT + 5)
        if any(self._await_renewed(kept, _REPLACE_LIMIT)):
            return self.replace(set(range(self.world_size)))
        were, their = ("was", "its") if len(lost) == 1 else ("were", "their")
        return [
            f"{name_ranks(lost).capitalize()} could not be freed and {were} replaced: {their} variables are gone.",
            *self._groups_lost(),
        ]

    def _ask_to_renew(self, ranks: Sequence[RankProcess], limit: float) -> None:
        for rank in ranks:
            rank.renewed = None
            rank.send({"type": "renew", "generation": self.generation, "timeout": limit})

    def _await_renewed(self, ranks: Sequence[RankProcess], limit: float) -> tuple[set[int], set[int]]:
        """The ranks that have not answered, and those that could not renew their groups."""
        until = time.monotonic() + limit
        if any(rank.alive and rank.renewed is None for rank in ranks):
            for _ in self.receive(until):
                if not any(rank.alive and rank.renewed is None for rank in ranks):
                    break
        silent = {rank.rank for rank in ranks if rank.renewed is None}
        return silent, {rank.rank for rank in ranks if rank.renewed and "error" in rank.renewed}

    def _groups_lost(self) -> list[str]:
        lost = any(rank.renewed and rank.renewed.get("retired") for rank in self.ranks)
        return ["Process groups and meshes made before must be made again."] if lost else []

    # End

    def shutdown(self, then: Callable[[], None] | None = None) -> None:
        """End every rank and what it has started. Returns when they are gone."""
        for rank in getattr(self, "ranks", []):
            self.launcher.end(rank)
        for rank in getattr(self, "ranks", []):
            self.await_status(rank, 2.0)
