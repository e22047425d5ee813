"""The last operations of a rank's process groups in a cell, kept in a file that outlives the rank.

The kernel reads it when ranks wait for one that has called something else, and when native code has ended a rank, so
that nobody is left to ask. Written on every call, so it is pages in memory that the system writes back, not a write.
"""

import mmap
from pathlib import Path
from typing import Any

_SLOTS, _SLOT = 16, 256  # calls that are remembered, bytes of each


def _path(folder: Path, rank: int) -> Path:
    return folder / f"last calls of rank {rank}"


class LastCalls:
    """Remembers the last operations (`note` is an observer of `watched_group`)."""

    def __init__(self, folder: Path, rank: int):
        self._file = _path(folder, rank).open("w+b")
        self._file.truncate(_SLOTS * _SLOT)
        self._pages = mmap.mmap(self._file.fileno(), _SLOTS * _SLOT)
        self._count = 0

    def note(self, call: dict[str, Any]) -> None:
        self._count += 1
        text = f"{self._count}\t{call['group']}\t{call['number']}\t{spoken(call)}".encode()[: _SLOT - 1]
        start = self._count % _SLOTS * _SLOT
        self._pages[start : start + len(text) + 1] = text + b"\0"

    def forget(self) -> None:
        """A new cell begins."""
        self._pages[:] = bytes(_SLOTS * _SLOT)


def spoken(call: dict[str, Any]) -> str:
    """ "all_reduce of 4 × float32", "send of 2 × int64 to rank 1"."""
    return call["operation"] + (f" of {call['given']}" if call["given"] else "") + call["peer"]


def read_calls(folder: Path, rank: int) -> dict[tuple[str, int], str]:
    """What a rank has called last in this cell, oldest first: (group, number in the group) → text."""
    path = _path(folder, rank)
    pages = path.read_bytes() if path.exists() else b""
    slots = [pages[start : start + _SLOT].split(b"\0")[0] for start in range(0, len(pages), _SLOT)]
    calls = sorted(
        (slot.decode(errors="replace").split("\t", 3) for slot in slots if slot), key=lambda call: int(call[0])
    )
    return {(group, int(number)): text for _, group, number, text in calls}


def read_last_call(folder: Path, rank: int) -> str:
    """The last of them; empty if the rank has called nothing in this cell."""
    return next(reversed(read_calls(folder, rank).values()), "")
