"""Shows what the ranks say in a cell: the lowest rank's output while it runs, the others' in turn, equal ones once.

What is shown depends on what the ranks said and on nothing else, so a saved notebook is the same after every run. A
block of output therefore ends with the name of the ranks that said it: at its beginning nobody knows yet whether the
others will say the same.
"""

import codecs
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from IPython.display import display

from scratch_ddp.cells.kernel.rank_lists import name_ranks

# FOLDED: What one rank said in one cell, in the order in which it said it.
#
# The kernel reads two pipes and a link, and can't see from them alone what came first. The rank therefore puts marks into
# the pipes (see `output_streams`), which cut its output into segments. Within a segment, text of the stream that Python
# was writing to comes first, then what reached the other one (C code, child processes).

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


class Screen:
    """Writes to the cell's output in the notebook. A line's end is held back until it is known what follows."""

    def __init__(self, transient: bool):
        self._transient = transient  # whether a person looks on, so that a passing line is of use
        self._stream = "stdout"
        self._held = ""  # a line end, not yet written
        self._lines = 0  # line ends in this block
        self._plain = True  # nothing but stdout in this block
        self._passing = ""

    def show(self, piece: Piece) -> None:
        self.erase_passing()
        if piece.text is None:
            self._release()
            self._plain = False
            display(piece.display["data"], metadata=piece.display["metadata"], raw=True)
            return
        if piece.stream != self._stream:
            self._release()
            self._flush()
            self._stream = piece.stream
        self._plain &= piece.stream == "stdout"
        text = self._held + piece.text
        self._held = "\n" if text.endswith("\n") else ""
        text = text.removesuffix("\n")
        self._lines += text.count("\n")
        self._write(text)
        if not self._held:
            self._unfinished = True

    def label(self, ranks: Sequence[int]) -> None:
        """End a block: say whose it was."""
        self.erase_passing()
        name = name_ranks(ranks)
        if self._plain and self._lines == 0:
            self._write(f"   ← {name}\n")
        else:
            self._end_line()
            self._to_stdout()
            self._write(f"↑ {name}\n")
        self._held, self._lines, self._plain = "", 0, True

    def note(self, text: str) -> None:
        """A line of the runtime's own."""
        self.erase_passing()
        self._end_line()
        self._to_stdout()
        self._write(text + "\n")

    def pass_by(self, text: str) -> None:
        """Show a line that leaves nothing behind (backspaces take it away again)."""
        if self._transient and text != self._passing:
            self.erase_passing()
            self._passing = text
            self._write(text)
            self._flush()

    def erase_passing(self) -> None:
        if self._passing:
            self._write("\b" * len(self._passing))
            self._passing = ""

    _unfinished = False  # the last line has no end

    def _end_line(self) -> None:
        if self._held or self._unfinished:
            self._held = "\n"
            self._release()

    def _release(self) -> None:
        if self._held:
            self._write(self._held)
            self._lines += 1
        self._held, self._unfinished = "", False

    def _to_stdout(self) -> None:
        if self._stream != "stdout":
            self._flush()
            self._stream = "stdout"

    def _write(self, text: str) -> None:
        if text:
            getattr(sys, self._stream).write(text)

    def _flush(self) -> None:
        getattr(sys, self._stream).flush()


class Presenter:
    """Collects the transcripts of a cell's ranks and puts them on the screen in their order."""

    def __init__(self, ranks: Sequence[int], mark: bytes, screen: Screen):
        self.screen = screen
        self.transcripts = {rank: Transcript(mark) for rank in ranks}
        self._said: dict[int, list[list]] = {rank: [] for rank in ranks}  # [[stream, [texts]] or ["display", data], …]
        self._closed: set[int] = set()
        self._left = list(ranks)  # whose output is not shown yet; the first one's is being shown

    def close(self, rank: int) -> None:
        """The rank is through with the cell."""
        self.transcripts[rank].close()
        self._closed.add(rank)

    def update(self) -> None:
        """Show what can be shown by now."""
        for rank, transcript in self.transcripts.items():
            for piece in transcript.pieces():
                self._remember(rank, piece)
                if self._left and rank == self._left[0]:
                    self.screen.show(piece)
        while self._left and self._left[0] in self._closed:
            leader, others = self._left[0], self._left[1:]
            if any(rank not in self._closed and not self._differs(rank, leader) for rank in others):
                return  # it may still come to say the same
            same = [leader] + [
                rank for rank in others if rank in self._closed and self._told(rank) == self._told(leader)
            ]
            if self._said[leader]:
                self.screen.label(same)
            self._left = [rank for rank in others if rank not in same]
            if self._left:
                self._show_again(self._left[0])

    def finish(self) -> None:
        """Show all that there is, also of ranks that never came to an end."""
        for rank in self.transcripts:
            self.close(rank)
        self.update()
        self.screen.erase_passing()

    def _remember(self, rank: int, piece: Piece) -> None:
        said = self._said[rank]
        if piece.text is None:
            said.append(["display", {kind: piece.display[kind] for kind in ("data", "metadata")}])
        elif said and said[-1][0] == piece.stream:
            said[-1][1].append(piece.text)
        else:
            said.append([piece.stream, [piece.text]])

    def _told(self, rank: int) -> list[list]:
        """What a rank has said so far; texts that follow each other on one stream are joined."""
        for entry in self._said[rank]:
            if entry[0] != "display" and len(entry[1]) > 1:
                entry[1] = ["".join(entry[1])]
        return self._said[rank]

    def _differs(self, rank: int, leader: int) -> bool:
        """Whether what a rank has said so far can't become what the leader said."""
        mine, its = self._told(rank), self._told(leader)
        if len(mine) > len(its):
            return True
        for index, (one, other) in enumerate(zip(mine, its, strict=False)):
            if one[0] != "display" and one[0] == other[0] and index == len(mine) - 1:
                if not other[1][0].startswith(one[1][0]):
                    return True
            elif one != other:
                return True
        return False

    def _show_again(self, rank: int) -> None:
        for kind, what in self._said[rank]:
            if kind == "display":
                self.screen.show(Piece("display", display=what))
            else:
                self.screen.show(Piece(kind, "".join(what)))
