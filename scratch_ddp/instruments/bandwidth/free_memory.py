"""Free memory on each rank's machine or GPU, and a check before anything is allocated: do all sizes fit?"""

import hashlib
import socket
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from scratch_ddp.common.agreement import gather_rows
from scratch_ddp.common.extras import extra
from scratch_ddp.instruments.sizes import format_about, format_size

USABLE = 0.9  # of the free memory: the ranks themselves grow a little, and so do other processes
_CGROUPS = Path("/sys/fs/cgroup")


class Place(NamedTuple):
    """Memory that ranks share: a number that identifies the machine or GPU on all its ranks, and its free bytes."""

    number: int
    free: int


def free_memory(cgroups: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes of main memory that this process may still use: free on the machine, and allowed by its cgroups."""
    with extra("cells"):
        import psutil
    return min([psutil.virtual_memory().available, *_left_in_cgroups(cgroups, own)])


def _left_in_cgroups(cgroups: Path, own: Path) -> list[int]:
    """Limit minus use of each cgroup from the process's own up to the top (Linux; version 2, memory of version 1)."""
    left = []
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top, limit, used = (
            (cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
            if controllers
            else (cgroups, "memory.max", "memory.current")
        )
        folder = top / path.lstrip("/")
        for group in (folder, *(parent for parent in folder.parents if parent.is_relative_to(top))):
            try:
                left.append(int((group / limit).read_text()) - int((group / used).read_text()) + _droppable(group))
            except (OSError, ValueError):  # no such file, or the limit is "max"
                continue
    return left


def _droppable(group: Path) -> int:
    """Bytes of cached files, which count as used but are dropped when memory is needed."""
    for line in (group / "memory.stat").read_text().splitlines():
        if line.startswith(("inactive_file ", "total_inactive_file ")):
            return int(line.split()[1])
    return 0


def places(device: torch.device, group: dist.ProcessGroup | None) -> list[Place]:
    """Return where each rank's tensors would lie, in rank order. All ranks of a place get its smallest free figure.

    Costs one all-gather of 16 bytes per rank.
    """
    name = f"{socket.gethostname()} {uuid.getnode()}"
    if device.type == "cpu":
        free = free_memory()
    else:
        name += str(torch.cuda.get_device_properties(device).uuid)
        free = torch.cuda.mem_get_info(device)[0]
    number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")
    rows = [row.tolist() for row in gather_rows(torch.tensor([number, free]), group)]
    return [Place(number, min(free for other, free in rows if other == number)) for number, _ in rows]


def check_fits(
    sizes: Sequence[int], counts: Sequence[int], where: Sequence[Place], memory: Callable[[int, int], int]
) -> None:
    """Raise ValueError unless every size fits for every number of ranks (the first ones of `where`).

    `memory(size, n)`: bytes that one rank of n needs. The error says what is needed, what is free and what would fit.
    """
    for n in sorted(counts, reverse=True):
        sharing = Counter(place.number for place in where[:n])
        for place in dict.fromkeys(where[:n]):
            together, usable = sharing[place.number], round(USABLE * place.free)
            needed = together * memory(max(sizes), n)
            if needed <= usable:
                continue
            fitting = [size for size in sizes if together * memory(size, n) <= usable]
            largest = usable * max(sizes) / needed
            would = f"Of the sizes asked for, {', '.join(map(format_size, sorted(fitting)))} would. " if fitting else ""
            raise ValueError(
                f"{format_size(max(sizes))} on {n} ranks does not fit: {together} of them share one machine or GPU and "
                f"need {format_about(needed)} ({format_about(needed / together)} each), "
                f"where {format_about(usable)} may be used ({USABLE:.0%} of what is free). "
                f"{would}The largest that fits is about {format_about(largest)}."
            )
