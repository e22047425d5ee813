"""What a rank did when: its computing, waiting and communication; all ranks side by side, also as one trace."""

import contextlib
import gzip
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from scratch_ddp.common.accounting import set_up

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time in ascending order, with intervals that touch or overlap joined into one."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def without(intervals: Iterable[Interval], removed: Iterable[Interval]) -> list[Interval]:
    """Return what is left of `intervals` outside `removed`, in ascending order."""
    left, holes = [], union(removed)
    for start, end in union(intervals):
        for hole_start, hole_end in holes:
            if start < hole_start < end:
                left.append((start, hole_start))
            if hole_start < end:
                start = max(start, hole_end)
        if start < end:
            left.append((start, end))
    return left


def total_seconds(intervals: Iterable[Interval]) -> float:
    """How long the intervals are together. Time in which they overlap counts once."""
    return sum(end - start for start, end in union(intervals))


COMPUTING = ("forward", "backward", "optimizer", "other", "data")  # what a rank is busy with; "data": loading it
PARTS = (*COMPUTING, "waiting", "transfer", "idle")  # of a step, see `breakdown`


@dataclass(frozen=True)
class Span:
    """A named interval in seconds of time.monotonic, which all ranks of a machine share."""

    name: str  # "backward", "all_reduce", "aten::mm"
    start: float
    end: float
    nbytes: int = 0  # of communication on a simulated link: bytes on its wire
    posted: float | None = None  # of communication: when it was called, if known
    stream: int | None = None  # of a GPU's kernel: where it was queued

    @property
    def interval(self) -> Interval:
        return self.start, self.end

    @property
    def called(self) -> float:
        return self.start if self.posted is None else self.posted


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
        sent, busy = ([span.interval for span in spans] for spans in (self.communication, self.compute))
        return total_seconds(without(sent, busy))

    def over_ranks(self, group: dist.ProcessGroup | None = None) -> list["Timeline"]:
        """The timelines of all ranks of one machine, by rank. Costs one all_gather_object, counted as set-up."""
        if not dist.is_initialized():
            return [self]
        reports: list[Timeline] = [self] * dist.get_world_size(group)
        with set_up():
            dist.all_gather_object(reports, self, group=group)
        return list({theirs.rank: theirs for theirs in reports}.values())  # a lone rank receives its own n times

    def save(self, path: str | Path, group: dist.ProcessGroup | None = None) -> None:
        """Write one trace of all ranks, compressed by gzip, for ui.perfetto.dev. A collective; the first rank writes.

        In Chrome's "Trace Event Format", a rank is a process with a thread for each track. Times are microseconds.
        """
        timelines = self.over_ranks(group)
        if self.rank == timelines[0].rank:
            with gzip.open(path, "wt") as file:
                json.dump({"traceEvents": [event for each in timelines for event in _trace_events(each)]}, file)


def by_operator(timeline: Timeline) -> dict[str, float]:
    """Seconds of each operator without those that it calls, largest first: `key_averages()` of torch's profiler."""
    spent: Counter[str] = Counter()
    open_spans: list[Span] = []
    for span in sorted(timeline.operations, key=lambda each: (each.start, -each.end)):
        while open_spans and open_spans[-1].end <= span.start:
            open_spans.pop()
        if open_spans:
            spent[open_spans[-1].name] -= span.end - span.start
        spent[span.name] += span.end - span.start
        open_spans.append(span)
    return dict(spent.most_common())


def _trace_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    rank = timeline.rank
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    for thread, (track, spans) in enumerate(_tracks(timeline), 1):
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": track}}
        for span in spans:
            told = {"bytes": span.nbytes} if span.nbytes else {}
            if span.posted is not None:
                told["queued for (ms)"] = 1e3 * (span.start - span.posted)
            times = {"ts": 1e6 * span.start, "dur": 1e6 * (span.end - span.start)}
            yield {"ph": "X", "name": span.name, "pid": rank, "tid": thread, "args": told, **times}


def _tracks(timeline: Timeline) -> Iterator[tuple[str, list[Span]]]:
    yield from {"compute": timeline.compute, "operations": timeline.operations, "waiting": timeline.waits}.items()
    lanes: list[list[Span]] = [[]]  # messages that overlap are in different ones
    for span in sorted(timeline.communication, key=lambda each: each.start):
        lane = next((lane for lane in lanes if not lane or lane[-1].end <= span.start), None)
        if lane is None:
            lanes.append(lane := [])
        lane.append(span)
    yield from (("communication", lane) for lane in lanes)
    if timeline.sites:
        yield "your lines", timeline.sites
    for stream in sorted({span.stream for span in timeline.kernels}):
        yield f"stream {stream}", [span for span in timeline.kernels if span.stream == stream]
