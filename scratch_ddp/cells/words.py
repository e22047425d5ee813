"""Lists of ranks, as a learner writes them (`%%rank [0,2]`) and as messages name them ("ranks 0–2"), and the errors."""

import re
from collections.abc import Iterable
from typing import Any


class _ShownAsText:
    """An exception that is shown as its own text: the kernel's frames would tell a learner nothing."""

    lines: list[str] = []

    def _render_traceback_(self) -> list[str]:  # IPython's name
        return [*self.lines, f"{type(self).__name__}: {self}"]


class ClusterError(_ShownAsText, RuntimeError):
    """A cell or a magic can't be carried out; the message says why and what would be right."""


class RankError(_ShownAsText, RuntimeError):
    """At least one rank raised or died in a cell. `lines` holds each distinct traceback once."""

    def __init__(self, message: str, lines: Iterable[str] = ()):
        super().__init__(message)
        self.lines = list(lines)


class RankInterrupt(_ShownAsText, KeyboardInterrupt):
    """The cell was stopped on every rank; the message says where the ranks were."""


def parse_cell_line(line: str, world_size: int) -> tuple[list[int], float | None]:
    """The ranks, and the seconds after which the cell is stopped (`--stop-after 3`). Raises ClusterError."""
    found = re.search(r"--stop-after[ =](\S+)", line)
    ranks = parse_ranks(line.replace(found[0], "") if found else line, world_size)
    try:
        return ranks, float(found[1]) if found else None
    except ValueError:
        raise ClusterError(f"--stop-after {found[1]}: not a number of seconds.") from None


def parse_ranks(text: str, world_size: int) -> list[int]:
    """The ranks that `text` names, ascending. Brackets may be left out. Raises ClusterError."""
    hint = f"Write %%rank [0], %%rank [0,1] or %%rank [0-{max(world_size - 1, 1)}]; this cluster has {world_size} "
    hint += f"ranks, 0 to {world_size - 1}." if world_size > 1 else "rank, 0."
    ranks: set[int] = set()
    try:
        for part in text.replace("–", "-").strip("[] ").split(","):
            left, dash, right = part.partition("-")
            first, last = int(left), int(right if dash else left)
            if last < first:
                raise ValueError("the last is before the first")
            if last >= world_size:
                raise ClusterError(f"there is no rank {max(first, world_size)}. {hint}")
            ranks.update(range(first, last + 1))
    except ValueError:
        raise ClusterError(f"{text.strip()!r} is not a list of ranks. {hint}") from None
    return sorted(ranks)


def name_ranks(ranks: Iterable[int]) -> str:
    """ "rank 2", "ranks 0–3", "ranks 0, 2–3": for messages and labels."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [str(first) if first == last else f"{first}–{last}" for first, last in runs]
    one = len(runs) == 1 and runs[0][0] == runs[0][1]
    return ("rank " if one else "ranks ") + ", ".join(parts)


def ranks_by(values: dict[int, Any]) -> dict[Any, list[int]]:
    """Of {rank: value}: {value: the ranks that have it}, in the order of `values`."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return ranks
