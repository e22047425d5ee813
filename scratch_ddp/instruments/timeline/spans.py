"""What a rank did when: its computing, waiting and communication; all ranks side by side, also as one trace.

The trace is in Chrome's format ("Trace Event Format", Google 2016), which ui.perfetto.dev and chrome://tracing open. A
rank is a process; computing, operations, waiting and communication are its threads. Times are microseconds from the
start of the earliest rank.
"""

import contextlib
import dataclasses
import gzip
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from scratch_ddp.common.accounting import set_up
from scratch_ddp.common.agreement import raise_everywhere
from scratch_ddp.instruments.intervals import Interval, exposed_seconds, total_seconds

COMPUTING = ("forward", "backward", "optimizer", "other", "data")  # what a rank is busy with; "data": loading it


@dataclass(frozen=True)
class Span:
    """A named interval in seconds of time.monotonic, which all ranks of a machine share."""

    name: str  # "backward", "all_reduce", "aten::mm"
    start: float
    end: float
    nbytes: int = 0  # of communication: bytes on a simulated link's wire; for a real collective, bytes of its tensors
    posted: float | None = None  # of communication: when it was called, if known
    stream: int | None = None  # of a GPU's kernel: where it was queued

    @property
    def interval(self) -> Interval:
        return self.start, self.end


@dataclass
class Timeline:
    """The timeline of one rank. It is filled when the block of `timeline()` ends."""

    rank: int = 0
    start: float = 0.0  # of the block, in seconds of time.monotonic
    end: float = 0.0
    compute: list[Span] = field(default_factory=list)  # with names from COMPUTING, without the waits
    waits: list[Span] = field(default_factory=list)
    communication: list[Span] = field(default_factory=list)
    operations: list[Span] = field(default_factory=list)  # every operation of torch, for the trace
    kernels: list[Span] = field(default_factory=list)  # of a GPU, those of NCCL too; for the trace
    sites: list[Span] = field(default_factory=list)  # at which line of your own code the rank was, if recorded
    steps: list[Interval] = field(default_factory=list)  # blocks of step()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Mark a training step inside the block of `timeline()`."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.steps.append((began, time.monotonic()))

    def seconds(self, *names: str) -> float:
        """Seconds of computing; with names ("backward", "optimizer"), of these alone."""
        return total_seconds(span.interval for span in self.compute if not names or span.name in names)

    def communication_seconds(self) -> float:
        """Seconds in which something was on the wire."""
        return total_seconds(span.interval for span in self.communication)

    def exposed_seconds(self) -> float:
        """Seconds in which something was on the wire while this rank did not compute."""
        return exposed_seconds([span.interval for span in self.compute], [span.interval for span in self.communication])

    def over_ranks(self, group: dist.ProcessGroup | None = None) -> list["Timeline"]:
        """Return the timelines of all ranks, by rank. A collective: every rank of `group` (default: all) calls it.

        Ranks of one machine share a clock; those of other machines are aligned by wall clock. Without a process group,
        the list holds this rank alone. Costs one all_gather_object, counted as set-up.
        """
        if not dist.is_initialized():
            return [self]
        clock = time.time() - time.monotonic()  # differs between machines, which booted at different times
        reports: list[tuple[float, Timeline] | None] = [None] * dist.get_world_size(group)
        with set_up():
            dist.all_gather_object(reports, (clock, self), group=group)
        aligned = [theirs if abs(at - clock) < 1 else theirs._shifted(at - clock) for at, theirs in reports]
        return list({theirs.rank: theirs for theirs in aligned}.values())  # a lone rank receives its own n times

    def save(self, path: str | Path, group: dist.ProcessGroup | None = None) -> None:
        """Write one trace of all ranks, compressed if `path` ends in ".gz".

        A collective, as `over_ranks`; the first rank writes. Raises OSError on every rank if the file can't be written.
        """
        timelines = self.over_ranks(group)
        problem = None
        if self.rank == timelines[0].rank:
            try:
                write_trace(timelines, path)
            except OSError as error:
                problem = f"the trace could not be written: {error}"
        raise_everywhere(problem, group, OSError)

    def _shifted(self, seconds: float) -> "Timeline":
        def shifted(span: Span) -> Span:
            posted = None if span.posted is None else span.posted + seconds
            return dataclasses.replace(span, start=span.start + seconds, end=span.end + seconds, posted=posted)

        lists = {
            name: [shifted(span) for span in getattr(self, name)]
            for name in ("compute", "waits", "communication", "operations", "kernels", "sites")
        }
        lists["steps"] = [(start + seconds, end + seconds) for start, end in self.steps]
        return dataclasses.replace(self, start=self.start + seconds, end=self.end + seconds, **lists)


# Threads of a rank in the trace; communication takes further ones where it overlaps.
_PHASES, _OPERATIONS, _WAITS, _COMMUNICATION, _SITES, _STREAMS = 1, 2, 3, 4, 90, 100


def write_trace(timelines: Sequence[Timeline], path: str | Path) -> None:
    """Write one trace of the timelines, compressed if `path` ends in ".gz". Raises OSError if it can't."""
    zero = min(each.start for each in timelines)
    events = [event for each in timelines for event in _events_of(each, zero)]
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": events})
    path = Path(path)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Divide spans among as few rows as possible so that none overlap in a row. There is at least one row."""
    rows: list[list[Span]] = [[]]
    for span in sorted(spans, key=lambda each: each.start):
        free = next((row for row in rows if not row or row[-1].end <= span.start), None)
        if free is None:
            rows.append(free := [])
        free.append(span)
    return rows


def _events_of(timeline: Timeline, zero: float) -> Iterator[dict[str, Any]]:
    rank = timeline.rank
    yield _label(rank, 0, "process_name", name=f"rank {rank}")
    yield _label(rank, 0, "process_sort_index", sort_index=rank)
    threads = [
        (_PHASES, "compute", timeline.compute),
        (_OPERATIONS, "operations", timeline.operations),
        (_WAITS, "waiting", timeline.waits),
    ]
    for number, lane in enumerate(lanes(timeline.communication)):
        threads.append((_COMMUNICATION + number, f"communication {number + 1}" if number else "communication", lane))
    if timeline.sites:
        threads.append((_SITES, "your lines", timeline.sites))
    for stream in sorted({span.stream for span in timeline.kernels if span.stream is not None}):
        kernels = [span for span in timeline.kernels if span.stream == stream]
        threads.append((_STREAMS + stream, f"stream {stream}", kernels))
    for thread, name, spans in threads:
        yield _label(rank, thread, "thread_name", name=name)
        yield _label(rank, thread, "thread_sort_index", sort_index=thread)
        for span in spans:
            yield from _slice(rank, thread, span, zero)


def _label(rank: int, thread: int, what: str, **content: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": thread, "name": what, "args": content}


def _slice(rank: int, thread: int, span: Span, zero: float) -> Iterator[dict[str, Any]]:
    def microseconds(moment: float) -> float:
        return round((moment - zero) * 1e6, 3)

    start = microseconds(span.start)
    content: dict[str, Any] = {"bytes": span.nbytes} if _COMMUNICATION <= thread < _SITES else {}
    if span.posted is not None:
        content["queued for (ms)"] = round((span.start - span.posted) * 1e3, 3)
        arrow = {"name": "posted", "cat": "link", "id": f"{rank}.{start}"}
        yield {"ph": "s", "pid": rank, "tid": _PHASES, "ts": microseconds(span.posted), **arrow}
        yield {"ph": "f", "bp": "e", "pid": rank, "tid": thread, "ts": start, **arrow}
    duration = round(microseconds(span.end) - start, 3)
    yield {"ph": "X", "pid": rank, "tid": thread, "name": span.name, "ts": start, "dur": duration, "args": content}
