"""The output of a cell, from the ranks' pipes to the notebook.

The lowest rank's output is shown while the cell runs, the others' after it, and equal output once. What is shown
depends on nothing but what the ranks wrote, so a saved notebook is the same after every run. A block of output
therefore ends with the names of its ranks: at its beginning nobody knows which ranks will write the same. Of a stream
of more than 1 MB the middle is left out (see `Excerpt`).

The kernel reads two pipes and a channel from each rank, and can't see from them what came first. So the rank writes
marks into its pipes (see `rank/output_streams.py`), which cut its output into segments. Within a segment the text of
the stream that Python wrote to comes first, then the text of the other one (from C code or child processes).
"""

import codecs
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from IPython.display import display

from scratch_ddp.cells.words import name_ranks

OUT, ERR = 1, 2
_FIRST, _LAST = 1 << 20, 1 << 16  # bytes of a stream's beginning and end that are kept
_NAMES = {OUT: "stdout", ERR: "stderr"}
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True)
class OutputItem:
    """A part of a rank's output: text of a stream, or a display."""

    stream: str  # "stdout", "stderr" or "display"
    content: Any  # the text, or {"data": …, "metadata": …} of the display


class CellOutput:
    """Shows the output of a cell's ranks in the notebook, rank by rank."""

    def __init__(self, ranks: Sequence[int], mark: bytes, notebook: "NotebookOutput"):
        self.notebook = notebook
        self.of_rank = {rank: RankOutput(mark) for rank in ranks}
        self._items: dict[int, list[OutputItem]] = {rank: [] for rank in ranks}
        self._closed: set[int] = set()
        self._late: dict[int, list[OutputItem]] = {}
        self._left = list(ranks)  # whose output is not complete on the screen; the first rank's is being shown

    def close(self, rank: int) -> None:
        """The rank is done with the cell."""
        self.of_rank[rank].close()
        self._closed.add(rank)

    def pass_over(self, ranks: Sequence[int]) -> None:
        """These ranks wait for ever: show the others' output. What they write after all follows at the end."""
        self._closed.update(ranks)

    def update(self) -> None:
        """Show what can be shown by now."""
        for rank, output in self.of_rank.items():
            for item in output.take():
                self._items[rank].append(item)
                if self._left and rank == self._left[0]:
                    self.notebook.show(item)
                elif rank not in self._left:  # it was passed over
                    self._late.setdefault(rank, []).append(item)
        while self._left and self._left[0] in self._closed:
            leader, others = self._left[0], self._left[1:]
            if any(rank not in self._closed and not self._differs(rank, leader) for rank in others):
                return  # this rank may still write the same
            same = [rank for rank in others if rank in self._closed and self._joined(rank) == self._joined(leader)]
            if self._items[leader]:
                self.notebook.label([leader, *same])
            self._left = [rank for rank in others if rank not in same]
            if self._left:
                for item in self._joined(self._left[0]):
                    self.notebook.show(item)

    def finish(self) -> None:
        """Show all that there is, also of ranks that did not finish the cell."""
        for rank in self.of_rank:
            self.close(rank)
        self.update()
        for rank, items in self._late.items():
            for item in items:
                self.notebook.show(item)
            self.notebook.label([rank])
        self._late = {}
        self.notebook.erase_passing()

    def _joined(self, rank: int) -> list[OutputItem]:
        """A rank's output so far. Texts that follow each other on one stream become one item."""
        items = []
        for stream, group in itertools.groupby(self._items[rank], key=lambda item: item.stream):
            if stream == "display":
                items += group
            else:
                items.append(OutputItem(stream, "".join(item.content for item in group)))
        self._items[rank] = items
        return items

    def _differs(self, rank: int, leader: int) -> bool:
        """Whether a rank's output so far can't become the leader's."""
        mine, its = self._joined(rank), self._joined(leader)
        if not mine:
            return False
        if len(mine) > len(its) or mine[:-1] != its[: len(mine) - 1]:
            return True
        last, other = mine[-1], its[len(mine) - 1]
        if last.stream == other.stream != "display":
            return not other.content.startswith(last.content)
        return last != other


class Excerpt:
    """Keeps the first and the last bytes of a stream. Of one that is short nothing is left out."""

    def __init__(self, first: int = _FIRST, last: int = _LAST):
        self._room, self._last = first, last
        self._beginning, self._end = bytearray(), bytearray()
        self._bytes = self._lines = 0  # left out

    def add(self, data: bytes) -> None:
        first = data[: self._room]
        self._room -= len(first)
        self._beginning += first
        self._end += data[len(first) :]
        if len(self._end) > 2 * self._last:
            self._leave_out(len(self._end) - self._last)

    def take(self) -> bytes:
        """The beginning, as far as it has not been taken yet."""
        beginning, self._beginning = self._beginning, bytearray()
        return bytes(beginning)

    def rest(self) -> bytes:
        """What follows on the beginning: a line that tells what was left out, and the end, from a new line on."""
        if not self._bytes and len(self._end) <= self._last:
            return bytes(self._end)
        earliest = len(self._end) - self._last
        self._leave_out(self._end.find(b"\n", earliest) + 1 or earliest)
        return f"\n… {self._lines:,} lines ({self._bytes / 1e6:.1f} MB) left out …\n".encode() + self._end

    def _leave_out(self, count: int) -> None:
        self._bytes += count
        self._lines += self._end.count(b"\n", 0, count)
        del self._end[:count]


@dataclass
class _Pipe:
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: _Utf8Decoder(errors="replace"))
    rest: bytes = b""  # the beginning of a mark whose end has not arrived
    segment: int = 0
    excerpt: Excerpt = field(default_factory=Excerpt)


class RankOutput:
    """Puts one rank's output in a cell into order. What arrives can be taken as far as its order is known."""

    def __init__(self, mark: bytes):
        self._mark_head = b"\0" + mark
        self._mark = _mark_pattern(mark)
        self._pipes = {OUT: _Pipe(), ERR: _Pipe()}
        self._text: dict[tuple[int, int], list[str]] = {}  # (segment, stream) → what has arrived and was not taken
        self._primary = {0: OUT}  # segment → the stream that Python wrote to
        self._displays: dict[int, dict[str, Any]] = {}
        self._awaited: set[int] = set()  # segments that begin with a display, which comes through the channel
        self._segment = 0  # the first that was not taken whole
        self._closed = False

    def read(self, stream: int, data: bytes) -> None:
        """Bytes from one of the rank's pipes."""
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
        excerpt = self._pipes[stream].excerpt
        excerpt.add(data)
        self._add_text(stream, excerpt.take())

    def _add_text(self, stream: int, data: bytes) -> None:
        pipe = self._pipes[stream]
        if text := pipe.decoder.decode(data):
            self._text.setdefault((pipe.segment, stream), []).append(text)

    def add_display(self, segment: int, message: dict[str, Any]) -> None:
        """A display that stands at the beginning of a segment."""
        self._displays[segment] = {"data": message["data"], "metadata": message["metadata"]}

    def close(self) -> None:
        """All that belongs to the cell has arrived."""
        if self._closed:
            return
        for stream, pipe in self._pipes.items():
            self._add(stream, pipe.rest)
            self._add_text(stream, pipe.excerpt.rest())
        self._closed = True

    def take(self) -> Iterator[OutputItem]:
        """What comes next and has not been taken yet."""
        while True:
            segment = self._segment
            complete = self._closed or min(pipe.segment for pipe in self._pipes.values()) > segment
            first = self._primary.get(segment)
            if first is None:
                return
            if segment in self._displays:
                self._awaited.discard(segment)
                yield OutputItem("display", self._displays.pop(segment))
            if segment in self._awaited and not self._closed:
                return
            yield from self._take_text(segment, first)
            if not complete:
                return
            yield from self._take_text(segment, ERR if first == OUT else OUT)
            del self._primary[segment]
            self._segment += 1

    def _take_text(self, segment: int, stream: int) -> Iterator[OutputItem]:
        texts = self._text.pop((segment, stream), None)
        if texts:
            yield OutputItem(_NAMES[stream], "".join(texts))


def without_marks(data: bytes, mark: bytes) -> str:
    """Output as text, where the order of the streams does not matter any more."""
    return _mark_pattern(mark).sub(b"", data).decode(errors="replace")


def _mark_pattern(mark: bytes) -> re.Pattern[bytes]:
    return re.compile(re.escape(b"\0" + mark) + rb" (\d+) ([12])(d?)\0")


def _may_become_mark(tail: bytes, head: bytes) -> bool:
    if len(tail) < len(head):
        return head.startswith(tail)
    return tail.startswith(head) and len(tail) < len(head) + 24


class NotebookOutput:
    """Writes to the cell's output in the notebook. A line end is held back until it is known what follows."""

    def __init__(self, attended: bool):
        self._attended = attended  # whether a person is watching; passing lines are for them
        self._stream = "stdout"
        self._held = ""  # a line end that was not written yet
        self._unfinished = False  # the last line has no end
        self._lines = 0  # line ends in this block
        self._plain = True  # nothing but stdout in this block
        self._passing = ""

    def show(self, item: OutputItem) -> None:
        self.erase_passing()
        if item.stream == "display":
            self._release()
            self._plain = False
            try:
                display(item.content["data"], metadata=item.content["metadata"], raw=True)
            except (TypeError, ValueError) as error:  # what a rank has sent is no display
                self.note(f"(a display can't be shown: {type(error).__name__}: {error})")
            return
        if item.stream != self._stream:
            self._release()
            self._flush()
            self._stream = item.stream
        self._plain &= item.stream == "stdout"
        text = self._held + item.content
        self._held = "\n" if text.endswith("\n") else ""
        text = text.removesuffix("\n")
        self._lines += text.count("\n")
        self._write(text)
        if not self._held:
            self._unfinished = True

    def label(self, ranks: Sequence[int]) -> None:
        """End a block: say whose output it was."""
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
        """A line of the rank cells' own."""
        self.erase_passing()
        self._end_line()
        self._to_stdout()
        self._write(text + "\n")

    def note_late(self, late: dict[tuple[int, int], Excerpt], mark: bytes, numbers: dict[int, int]) -> None:
        """Show what ranks wrote after their cell had ended (`Cluster.late`), and the number of that cell."""
        ranks_of: dict[tuple[int, str], list[int]] = {}
        for (cell, rank), excerpt in sorted(late.items()):
            text = without_marks(excerpt.take() + excerpt.rest(), mark).rstrip()
            ranks_of.setdefault((cell, text), []).append(rank)
        for (cell, text), ranks in ranks_of.items():
            if text.strip():
                self.note(f"(late output of {name_ranks(ranks)} from cell [{numbers.get(cell, '?')}])\n{text}")
        late.clear()

    def show_passing(self, text: str) -> None:
        """Show a line that leaves nothing behind (backspaces erase it again)."""
        if self._attended and text != self._passing:
            self.erase_passing()
            self._passing = text
            self._write(text)
            self._flush()

    def erase_passing(self) -> None:
        if self._passing:
            self._write("\b" * len(self._passing))
            self._passing = ""

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
