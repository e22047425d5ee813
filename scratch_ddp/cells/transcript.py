"""What one rank said in one cell, in the order in which it said it.

The kernel reads two pipes and a link, and can't see from them alone what came first. The rank therefore puts marks into
the pipes (see `output_streams`), which cut its output into segments. Within a segment, text of the stream that Python
was writing to comes first, then what reached the other one (C code, child processes).
"""

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

OUT, ERR = 1, 2
_NAMES = {OUT: "stdout", ERR: "stderr"}


@dataclass(frozen=True)
class Piece:
    """A part of a rank's output: text of a stream, or a display (`text` is None)."""

    stream: str
    text: str | None = None
    display: dict[str, Any] | None = None


@dataclass
class _Pipe:
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )
    rest: bytes = b""  # the beginning of a mark whose end has not arrived
    segment: int = 0


class Transcript:
    """Takes what arrives (`read`, `place`, `close`) and gives it back in order (`pieces`) as far as that is known."""

    def __init__(self, mark: bytes):
        self._mark_head = b"\0" + mark
        self._mark = _marks(mark)
        self._pipes = {OUT: _Pipe(), ERR: _Pipe()}
        self._text: dict[tuple[int, int], list[str]] = {}  # (segment, stream) → what arrived and was not given back
        self._primary = {0: OUT}
        self._displays: dict[int, dict[str, Any]] = {}
        self._awaited: set[int] = set()  # segments that begin with a display, which comes by the link
        self._segment = 0  # the first that is not given back whole
        self._closed = False

    def read(self, stream: int, data: bytes) -> None:
        pipe = self._pipes[stream]
        data = pipe.rest + data
        pipe.rest = b""
        start = 0
        for mark in self._mark.finditer(data):
            self._add(stream, data[start : mark.start()])
            pipe.segment = int(mark[1])
            if mark[3] and pipe.segment not in self._primary:
                self._awaited.add(pipe.segment)
            self._primary[pipe.segment] = int(mark[2])
            start = mark.end()
        tail = data[start:]
        cut = tail.rfind(b"\0")
        if cut >= 0 and _may_become_mark(tail[cut:], self._mark_head):
            pipe.rest, tail = tail[cut:], tail[:cut]
        self._add(stream, tail)

    def _add(self, stream: int, data: bytes) -> None:
        pipe = self._pipes[stream]
        if text := pipe.decoder.decode(data):
            self._text.setdefault((pipe.segment, stream), []).append(text)

    def place(self, segment: int, display: dict[str, Any]) -> None:
        """A display that stands at the beginning of a segment."""
        self._displays[segment] = display

    def close(self) -> None:
        """All that belongs to the cell has arrived."""
        for stream, pipe in self._pipes.items():
            self._add(stream, pipe.rest)
            pipe.rest = b""
        self._closed = True

    def pieces(self) -> Iterator[Piece]:
        """What follows in order and has not been given back yet."""
        while True:
            segment = self._segment
            complete = self._closed or min(pipe.segment for pipe in self._pipes.values()) > segment
            first = self._primary.get(segment)
            if first is None:
                return
            if segment in self._displays:
                self._awaited.discard(segment)
                yield Piece("display", display=self._displays.pop(segment))
            if segment in self._awaited and not self._closed:
                return
            yield from self._take(segment, first)
            if not complete:
                return
            yield from self._take(segment, ERR if first == OUT else OUT)
            self._segment += 1

    def _take(self, segment: int, stream: int) -> Iterator[Piece]:
        texts = self._text.pop((segment, stream), None)
        if texts:
            yield Piece(_NAMES[stream], "".join(texts))


def without_marks(data: bytes, mark: bytes) -> str:
    """Output whose order no longer matters, as text."""
    return _marks(mark).sub(b"", data).decode(errors="replace")


def _marks(mark: bytes) -> re.Pattern[bytes]:
    return re.compile(re.escape(b"\0" + mark) + rb" (\d+) ([12])(d?)\0")


def _may_become_mark(tail: bytes, head: bytes) -> bool:
    if len(tail) < len(head):
        return head.startswith(tail)
    return tail.startswith(head) and len(tail) < len(head) + 24
