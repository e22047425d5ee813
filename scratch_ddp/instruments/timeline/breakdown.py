"""Where a step's time went, on each rank: by parts that add up to the step, and by line of your own code.

A rank that has called a collective either waits for the last rank to call it, too, or the data is on its way. Only the
records of all ranks, which share a clock, can tell: data can't be on its way before the last rank has called.
"""

import contextlib
import linecache
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from scratch_ddp.instruments.timeline.spans import COMPUTING, PARTS, Span, Timeline, total_seconds, union, without

_EVERY = 2e-3  # seconds from one look at the thread to the next
_WIDTH = 60  # characters of a line that are shown
_PYTHONS = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_LIBRARIES = tuple(map(str, (*torch.__path__, Path(__file__).parents[2], *_PYTHONS, "<frozen")))
_MESSAGES = ("send", "recv", "SendRecv")  # between two ranks; the last is in the name of NCCL's kernel


@dataclass(frozen=True)
class Breakdown:
    """A step of one rank, in parts that don't overlap: by name from PARTS, when it took place, in seconds.

    Those of COMPUTING: this rank was busy, whatever was on the wire. Of the rest: "waiting", for a rank that had not
    called the same collective yet; "transfer", when all had; "idle".
    """

    rank: int
    start: float
    end: float
    parts: dict[str, list[tuple[float, float]]]

    @property
    def step(self) -> float:
        """Seconds of the whole step: the sum of the parts."""
        return self.end - self.start

    def seconds(self, *names: str) -> float:
        """Seconds of these parts; without names, of all."""
        return sum(total_seconds(self.parts[name]) for name in names or PARTS)


def breakdown(timelines: Sequence[Timeline], steps: Sequence[tuple[float, float]] = ()) -> list[Breakdown]:
    """Divide what each rank recorded, or its step; by rank. Raises ValueError if their collectives are not the same."""
    found = []
    steps = steps or [(each.start, each.end) for each in timelines]
    # One part after the other gets what is left of the step.
    for timeline, calls, step in zip(timelines, collectives(timelines), steps, strict=True):
        pending = calls + [(span, span.start) for span in timeline.communication if _is_message(span)]
        candidates = [
            *((name, [span.interval for span in timeline.compute if span.name == name]) for name in COMPUTING),
            ("transfer", [(max(span.called, ready), span.end) for span, ready in pending if span.end > ready]),
            ("waiting", [(span.called, ready) for span, ready in pending if ready > span.called]),
            ("transfer", [span.interval for span in timeline.waits]),  # beyond a transfer's end: until the rank woke up
        ]
        left, parts = [step], {name: [] for name in PARTS}
        for name, intervals in candidates:
            remaining = without(left, intervals)
            parts[name] = union([*parts[name], *without(left, remaining)])
            left = remaining
        found.append(Breakdown(timeline.rank, *step, parts | {"idle": left}))
    return found


def breakdown_of_steps(timelines: Sequence[Timeline]) -> list[list[Breakdown]]:
    """Divide each block of `with recorded.step():`: a list per step, by rank. Raises as `breakdown`, or without."""
    counts = [len(each.steps) for each in timelines]
    if not all(counts) or len(set(counts)) > 1:
        raise ValueError(f"put each step into a block `with recorded.step():`; steps that the ranks recorded: {counts}")
    return [breakdown(timelines, steps) for steps in zip(*(each.steps for each in timelines), strict=True)]


def collectives(timelines: Sequence[Timeline]) -> list[list[tuple[Span, float]]]:
    """Each rank's collectives, with the time at which the last rank called the same one. Raises as `breakdown`."""
    spans = [[span for span in each.communication if not _is_message(span)] for each in timelines]
    if any([span.name for span in mine] != [span.name for span in spans[0]] for mine in spans):
        counts = [len(mine) for mine in spans]
        raise ValueError(f"the ranks recorded different collectives ({counts}): record calls of one group")
    ready = [max(span.called for span in same) for same in zip(*spans, strict=True)]
    return [list(zip(mine, ready, strict=True)) for mine in spans]


def as_table(parts: Sequence[Breakdown]) -> str:
    """The parts in milliseconds, a line per rank, as text. Parts that no rank has are left out."""
    names = [name for name in PARTS if any(each.seconds(name) >= 5e-5 for each in parts)]
    lines = [f"{'rank':>4}  " + "  ".join(f"{name:>9}" for name in [*names, "step"])]
    for each in parts:
        figures = [each.seconds(name) for name in names] + [each.step]
        lines.append(f"{each.rank:>4}  " + "  ".join(f"{1e3 * seconds:9.1f}" for seconds in figures))
    return "\n".join(lines)


def _is_message(span: Span) -> bool:
    return any(name in span.name for name in _MESSAGES)


def by_call_site(timeline: Timeline, within: Breakdown, *parts: str) -> dict[str, float]:
    """Seconds of a step, or of parts of it, by line of your own code. Raises ValueError without `call_sites=True`."""
    if not timeline.sites:
        raise ValueError(f"rank {timeline.rank} recorded no lines: open the block with timeline(call_sites=True)")
    wanted = [interval for name in parts or within.parts for interval in within.parts[name]]
    spent: Counter[str] = Counter()
    for site in timeline.sites:
        spent[site.name] += total_seconds([site.interval]) - total_seconds(without([site.interval], wanted))
    return {name: seconds for name, seconds in spent.most_common() if seconds > 0}


@contextlib.contextmanager
def call_sites_recorded() -> Iterator[list[Span]]:
    """Look every two milliseconds which line this thread is at, and list how long it was seen at each."""
    spans: list[Span] = []
    over, watched, began = threading.Event(), threading.get_ident(), time.monotonic()

    def look() -> None:
        while not over.wait(_EVERY):
            site, until = _site(sys._current_frames().get(watched)), time.monotonic() + _EVERY / 2
            if spans and spans[-1].name == site:
                spans[-1] = Span(site, spans[-1].start, until)
            else:
                spans.append(Span(site, spans[-1].end if spans else began, until))

    watcher = threading.Thread(target=look, name="call-sites", daemon=True)
    watcher.start()
    try:
        yield spans
    finally:
        over.set()
        watcher.join()


def _site(frame: FrameType | None) -> str:
    """The innermost line that is in no library, such as "train, line 4: loss.backward()"."""
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    if frame is None:
        return "elsewhere"
    text = linecache.getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals).strip()
    return f"{frame.f_code.co_name}, line {frame.f_lineno}: {text[:_WIDTH]}"
