"""The last operation of a rank's process groups, kept in a file that outlives the rank.

When native code ends a rank, nobody is left to ask; the kernel reads the file. Written on every call of a collective,
so it is a page in memory that the system writes back, not a write to disk.
"""

import mmap
from pathlib import Path
from typing import Any

_PAGE = 512  # bytes


def _path(folder: Path, rank: int) -> Path:
    return folder / f"last call of rank {rank}"


class LastCall:
    """Remembers one operation at a time (`note` is an observer of `watched_group`)."""

    def __init__(self, folder: Path, rank: int):
        self._file = _path(folder, rank).open("w+b")
        self._file.truncate(_PAGE)
        self._page = mmap.mmap(self._file.fileno(), _PAGE)

    def note(self, call: dict[str, Any]) -> None:
        given = f" of {call['given']}" if call["given"] else ""
        text = f"{call['operation']}{given}".encode()[: _PAGE - 1]
        self._page[: len(text) + 1] = text + b"\0"

    def forget(self) -> None:
        self._page[:1] = b"\0"


def read_last_call(folder: Path, rank: int) -> str:
    """ "all_reduce of 4 × float32"; empty if the rank has called nothing in the cell."""
    path = _path(folder, rank)
    return path.read_bytes().split(b"\0")[0].decode(errors="replace") if path.exists() else ""
