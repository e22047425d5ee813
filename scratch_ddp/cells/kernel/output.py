"""The output of a cell, from the ranks' pipes to the notebook.

The lowest rank's output is shown while the cell runs, the others' at its end, and equal output once. What is shown
depends on nothing but what the ranks wrote, so a saved notebook is the same after every run. A block of output
therefore ends with the names of its ranks: at its beginning nobody knows which ranks will write the same. Of a stream
of more than 1 MB the rest is left out, so no cell fills the kernel's memory.

A rank's output is one pipe. Marks in it tell what Python has written to stderr, and hold displays, in pieces that
other processes' text may stand between (see `rank/output_streams.py`).
"""

import codecs
import itertools
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from IPython.display import display

from scratch_ddp.cells.words import name_ranks

OUT, ERR = 1, 2
_MOST = 1 << 20  # bytes of a stream that are kept
_LATE = 1 << 14  # the same of what comes after the end of its cell
_NAMES = {OUT: "stdout", ERR: "stderr"}
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True)
class OutputItem:
    """A part of a rank's output: text of a stream, or a display."""

    stream: str  # "stdout", "stderr" or "display"
    content: str  # the text, or {"data": …, "metadata": …} of the display as JSON


class CellOutput:
    """Shows the output of a cell's ranks in the notebook: the lowest rank's at once, the others' at the end."""

    def __init__(self, ranks: Sequence[int], mark: bytes, notebook: "NotebookOutput"):
        self.notebook = notebook
        self.of_rank = {rank: RankOutput(mark) for rank in ranks}
        self._items: dict[int, list[OutputItem]] = {rank: [] for rank in ranks}
        self._live = min(ranks)

    def update(self) -> None:
        """Show what can be shown by now."""
        for rank, output in self.of_rank.items():
            items = output.take()
            self._items[rank] += items
            for item in items if rank == self._live else ():
                self.notebook.show(item)

    def finish(self) -> None:
        """Show the ranks' output in order, equal output once. That of the lowest rank is on the screen."""
        for output in self.of_rank.values():
            output.close()
        self.update()
        left = {rank: _joined(items) for rank, items in self._items.items() if items}
        while left:
            first, items = next(iter(left.items()))
            same = [rank for rank in left if left[rank] == items]
            for item in items if first != self._live else ():
                self.notebook.show(item)
            self.notebook.label(same)
            left = {rank: left[rank] for rank in left if rank not in same}
        self.notebook.erase_passing()


def _joined(items: list[OutputItem]) -> list[OutputItem]:
    """Texts that follow each other on one stream become one item."""
    joined = []
    for stream, group in itertools.groupby(items, key=lambda item: item.stream):
        if stream == "display":
            joined += group
        else:
            joined.append(OutputItem(stream, "".join(item.content for item in group)))
    return joined


def _mark_pattern(mark: bytes) -> re.Pattern[bytes]:
    """Marks: text of this stream follows; a piece of a display; a display is complete."""
    return re.compile(re.escape(b"\0" + mark) + rb" (?:s([12])|d([\d.]+) ([^\0]*)|e([\d.]+))\0")


def without_marks(data: bytes, mark: bytes) -> str:
    """A rank's output as text, where the order of the streams does not matter any more."""
    return _mark_pattern(mark).sub(b"", data).decode(errors="replace")


class RankOutput:
    """One rank's output in a cell, in its order. Of each stream the first `most` bytes are kept.

    Of `late` output less is kept, and displays are only named: they may have begun while the cell ran.
    """

    def __init__(self, mark: bytes, most: int = _MOST, late: bool = False):
        self._mark_head = b"\0" + mark
        self._mark = _mark_pattern(mark)
        self._late = late
        self._rest = bytearray()  # the beginning of a mark whose end has not arrived
        self._displays: dict[bytes, bytearray] = {}  # name → the pieces that have arrived, of one that is not complete
        self._room = dict.fromkeys((OUT, ERR), _LATE if late else most)  # less than 0: so much was left out
        self._decoders = {stream: _Utf8Decoder(errors="replace") for stream in (OUT, ERR)}
        self._stream = OUT  # whose text comes next
        self._coming: list[OutputItem] = []  # not taken yet

    def read(self, data: bytes) -> None:
        """Bytes from the rank's pipe."""
        self._rest += data
        data, start = self._rest, 0
        for mark in self._mark.finditer(data):
            self._add(data[start : mark.start()])
            self._take_mark(mark)
            start = mark.end()
        cut = data.rfind(b"\0", start)
        if cut < 0 or not (data[cut:].startswith(self._mark_head) or self._mark_head.startswith(data[cut:])):
            cut = len(data)
        self._add(data[start:cut])
        self._rest = data[cut:]

    def _take_mark(self, mark: re.Match[bytes]) -> None:
        stream, piece_of, piece, whole = mark.groups()
        if stream:
            self._stream = int(stream)
        elif self._late and whole:
            self._add(b"<a display>\n")
        elif piece_of and not self._late:
            self._displays.setdefault(piece_of, bytearray()).extend(piece)
        elif whole:
            self._coming.append(OutputItem("display", self._displays.pop(whole).decode(errors="replace")))

    def _add(self, data: bytes) -> None:
        stream = self._stream
        kept = data[: max(0, self._room[stream])]
        self._room[stream] -= len(data)
        if text := self._decoders[stream].decode(kept):
            self._coming.append(OutputItem(_NAMES[stream], text))

    def close(self) -> None:
        """All that belongs to the cell has arrived. Called once."""
        if not self._rest.startswith(self._mark_head):
            self._add(self._rest)
        for stream, room in self._room.items():
            if room < 0:
                self._coming.append(OutputItem(_NAMES[stream], f"\n… {-room / 1e6:.1f} MB left out …\n"))

    def take(self) -> list[OutputItem]:
        """What has come and was not taken yet."""
        coming, self._coming = self._coming, []
        return coming


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
                content = json.loads(item.content)
                display(content["data"], metadata=content["metadata"], raw=True)
            except (TypeError, ValueError) as error:  # what a rank has sent is no display
                self.note(f"(a display can't be shown: {type(error).__name__}: {error})")
            return
        self._change_to(item.stream)
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
            self._change_to("stdout")
            self._write(f"↑ {name}\n")
        self._held, self._lines, self._plain = "", 0, True

    def note(self, text: str) -> None:
        """A line of the rank cells' own."""
        self.erase_passing()
        self._end_line()
        self._change_to("stdout")
        self._write(text + "\n")

    def note_late(self, late: "dict[tuple[int, int], RankOutput]", numbers: dict[int, int]) -> None:
        """Show what ranks wrote after their cell had ended (`Cluster.late`), and the number of that cell."""
        ranks_of: dict[tuple[int, str], list[int]] = {}
        for cell, rank in sorted(late):
            output = late[cell, rank]
            output.close()
            text = "".join(item.content for item in output.take())
            ranks_of.setdefault((cell, text.rstrip()), []).append(rank)
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
            getattr(sys, self._stream).flush()

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

    def _change_to(self, stream: str) -> None:
        if stream != self._stream:
            self._release()
            getattr(sys, self._stream).flush()
            self._stream = stream

    def _write(self, text: str) -> None:
        if text:
            getattr(sys, self._stream).write(text)
