"""Where in the program a step's time was spent: by line of your own code."""

import contextlib
import linecache
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

from scratch_ddp.instruments.intervals import total_seconds, without
from scratch_ddp.instruments.timeline.breakdown import Breakdown
from scratch_ddp.instruments.timeline.spans import Span, Timeline

_EVERY = 2e-3  # seconds from one look at the thread to the next
_WIDTH = 60  # characters of a line that are shown
_PYTHONS = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_LIBRARIES = tuple(map(str, (*torch.__path__, Path(__file__).parents[2], *_PYTHONS, "<frozen")))


def by_call_site(timeline: Timeline, within: Breakdown, *parts: str) -> dict[str, float]:
    """Seconds of a step, or of these parts of it, by the line of your own code that the rank was at, largest first.

    Raises ValueError if no lines were recorded: it needs `timeline(group, call_sites=True)`.
    """
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
