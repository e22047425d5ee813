"""The last collectives and messages that a rank has called, in a file that outlives the rank.

(torch has the same for NCCL, under the same name.) The launcher reads it when a rank has died and can't be asked.
Ranks read each other's, so that two different calls are noticed before gloo begins the second. It is written on every
call, so the file is mapped into memory and costs no system call.

The file is a ring of slots. A slot holds the count of the call, the cell, the group's name, the number of the call in
the group, and the call in words, separated by tabs and ended by a zero byte. A table of numbers follows, for a quick
comparison: at the place of a collective, which is the same in all ranks, the upper half tells which collective it is
and the lower half is a checksum of its words.
"""

import mmap
import os
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scratch_ddp.cells.words import name_ranks, ranks_by

Record = tuple[int, str, int, str]  # the cell, the group, the number in the group, the call in words
_SLOTS, _SLOT = 16, 256  # calls that are remembered, bytes of each
_TABLE = 64  # collectives in the table
_SIZE = _SLOTS * _SLOT + 8 * _TABLE
_FOR_OTHERS = 0.2  # seconds


class FlightRecorder:
    """The writer, in the rank. `record` is an observer of `interruptible_group`. `peers` are the other ranks."""

    def __init__(self, folder: Path, rank: int, peers: Iterable[int] = ()):
        self.cell = 0  # the cell that runs
        self._folder, self._rank, self._peers = folder, rank, list(peers)
        self._pages = _map(folder, rank)
        self._pages[:] = bytes(_SIZE)  # a rank that is replaced leaves its file, which others have mapped
        self._table = _table(self._pages)
        self._tables: list[memoryview] = []  # of the peers
        self._count = 0

    def record(self, call: dict[str, Any]) -> None:
        """Write down a call that is about to begin. Raises ValueError if a peer has made another one in its place."""
        self._count += 1
        words = describe_call(call)
        fields = (self._count, self.cell, call["group"], call["number"], words)
        text = "\t".join(map(str, fields)).encode()[: _SLOT - 1]
        start = self._count % _SLOTS * _SLOT
        self._pages[start : start + len(text) + 1] = text + b"\0"
        if call["uid"] is not None and not call["peer"]:
            self._compare(call, words)

    def _compare(self, call: dict[str, Any], words: str) -> None:
        """Of two ranks that make a call at the same time at least one sees the other's: each writes, then reads."""
        which = (call["uid"] + call["number"]) & 0xFFFFFFFF
        place, entry = which % _TABLE, which << 32 | zlib.crc32(words.encode())
        self._table[place] = entry
        if not self._tables:
            self._tables = [_table(_map(self._folder, peer)) for peer in self._peers]
        seen = [table[place] for table in self._tables]
        differ = any(theirs != entry and theirs >> 32 == which for theirs in seen)
        if differ and (said := tell_difference(self._called(call, words, which))):
            raise ValueError(said)

    def _called(self, call: dict[str, Any], words: str, which: int) -> dict[int, str]:
        """What each rank has called in this place.

        Waits a moment for those that have not come here yet, so that all ranks say the same.
        """
        tables = dict(zip(self._peers, self._tables, strict=True))
        deadline = time.monotonic() + _FOR_OTHERS
        while True:
            here = [peer for peer, table in tables.items() if table[which % _TABLE] >> 32 == which]
            if len(here) == len(tables) or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        place = call["group"], call["number"]
        records = {peer: read_records(self._folder, peer) for peer in here}
        calls = {peer: {(group, number): said for _, group, number, said in records[peer]} for peer in here}
        return {peer: calls[peer].get(place, words) for peer in here} | {self._rank: words}

    def calls(self) -> list[Record]:
        """What this rank has called last in the cell that runs, oldest first."""
        return [record for record in _records(self._pages[:]) if record[0] == self.cell]


IN_THIS_CELL = "in this cell"  # collectives, whatever their group: where a rank is in a program that all ranks run
ALL_THE_SAME = "All ranks must make the same call, with tensors of the same shape and dtype"


def describe_call(call: dict[str, Any]) -> str:
    """ "all_reduce (SUM) of 4 × float32", "broadcast of 4 × float32 from rank 0", "send of 2 × int64 to rank 1"."""
    given = f" of {call['given']}" if call["given"] else ""
    return f"{call['operation']}{call['op']}{given}{call['root']}{call['peer']}"


def tell_difference(calls: dict[int, str], where: str = "") -> str:
    """ "rank 0 called X; ranks 1–3 called Y. All ranks must …"; empty if all have called the same."""
    ranks = ranks_by(dict(sorted(calls.items())))
    said = "; ".join(f"{name_ranks(callers)} called {words}" for words, callers in ranks.items())
    return f"{said}{where}. {ALL_THE_SAME}" if len(ranks) > 1 else ""


def read_records(folder: Path, rank: int) -> list[Record]:
    """What a rank has called last, oldest first."""
    path = _path(folder, rank)
    return _records(path.read_bytes()) if path.exists() else []


def _records(pages: bytes) -> list[Record]:
    slots = [pages[start : start + _SLOT].split(b"\0")[0] for start in range(0, _SLOTS * _SLOT, _SLOT)]
    records = [slot.decode(errors="replace").split("\t", 4) for slot in slots if slot]
    records.sort(key=lambda record: int(record[0]))
    return [(int(cell), group, int(number), words) for _, cell, group, number, words in records]


def _map(folder: Path, rank: int) -> mmap.mmap:
    """The file of a rank, made if it is not there."""
    descriptor = os.open(_path(folder, rank), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(descriptor, _SIZE)
        return mmap.mmap(descriptor, _SIZE)
    finally:
        os.close(descriptor)


def _table(pages: mmap.mmap) -> memoryview:
    return memoryview(pages)[_SLOTS * _SLOT :].cast("Q")


def _path(folder: Path, rank: int) -> Path:
    return folder / f"calls of rank {rank}"
