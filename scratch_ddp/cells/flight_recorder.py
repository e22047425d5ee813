"""The last collectives and messages that a rank has called, in a file that outlives the rank.

(torch has the same for NCCL, under the same name.) The kernel reads it when ranks wait for one that has called
something else, and when a rank has died and can't be asked. It is written on every call, so the file is mapped into
memory and costs no system call.

The file is a ring of slots. A slot holds the count of the call, the cell, the group's name, the number of the call in
the group, and the call in words, separated by tabs and ended by a zero byte.
"""

import mmap
from pathlib import Path
from typing import Any

_SLOTS, _SLOT = 16, 256  # calls that are remembered, bytes of each


class FlightRecorder:
    """The writer, in the rank. `record` is an observer of `interruptible_group`."""

    def __init__(self, folder: Path, rank: int):
        self.cell = 0  # the cell that runs
        self._file = _path(folder, rank).open("w+b")
        self._file.truncate(_SLOTS * _SLOT)
        self._pages = mmap.mmap(self._file.fileno(), _SLOTS * _SLOT)
        self._count = 0

    def record(self, call: dict[str, Any]) -> None:
        self._count += 1
        fields = (self._count, self.cell, call["group"], call["number"], describe_call(call))
        text = "\t".join(map(str, fields)).encode()[: _SLOT - 1]
        start = self._count % _SLOTS * _SLOT
        self._pages[start : start + len(text) + 1] = text + b"\0"


def describe_call(call: dict[str, Any]) -> str:
    """ "all_reduce of 4 × float32", "send of 2 × int64 to rank 1"."""
    return call["operation"] + (f" of {call['given']}" if call["given"] else "") + call["peer"]


def read_calls(folder: Path, rank: int, cell: int) -> dict[tuple[str, int], str]:
    """What a rank has called last in this cell, oldest first: (group, number in the group) → text."""
    path = _path(folder, rank)
    pages = path.read_bytes() if path.exists() else b""
    slots = [pages[start : start + _SLOT].split(b"\0")[0] for start in range(0, len(pages), _SLOT)]
    records = [slot.decode(errors="replace").split("\t", 4) for slot in slots if slot]
    records = sorted((record for record in records if int(record[1]) == cell), key=lambda record: int(record[0]))
    return {(group, int(number)): text for _, _, group, number, text in records}


def _path(folder: Path, rank: int) -> Path:
    return folder / f"calls of rank {rank}"
