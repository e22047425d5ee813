"""The results of timing collectives: times, three kinds of bandwidth, fits, a table."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from scratch_ddp.instruments.bandwidth.alpha_beta import AlphaBeta, fit, key
from scratch_ddp.instruments.bandwidth.operations import OPERATIONS
from scratch_ddp.instruments.sizes import format_size, three_digits
from scratch_ddp.instruments.timing import Spread


@dataclass(frozen=True)
class Row:
    """One operation at one size: `seconds` per call, over `samples` samples of `calls` calls each.

    `size`: the requested bytes; `nbytes`: S, the bytes that were timed (see `Operation.nbytes`). Bandwidths are bytes
    per second of the median time.
    """

    operation: str
    backend: str
    ranks: int
    size: int
    nbytes: int
    seconds: Spread
    samples: int
    calls: int

    @property
    def algbw(self) -> float:
        """S/t, "algorithm bandwidth": how fast the operation is, regardless of the bytes it moves."""
        return self.nbytes / self.seconds.median

    @property
    def busbw(self) -> float:
        """What a link carries: 2(n-1)/n·S/t for an all-reduce, other factors for others. Comparable across n."""
        return OPERATIONS[self.operation].bus_factor(self.ranks) * self.algbw

    @property
    def published(self) -> float | None:
        """2·S/t, for all-reduces alone: what a link carries for infinite n. For 2 ranks that is twice too much."""
        return 2 * self.algbw if self.operation.endswith("all_reduce") else None


@dataclass(frozen=True)
class Results:
    """All rows of a run, the same on every rank, in the order of ranks, sizes and operations."""

    rows: tuple[Row, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def of(self, operation: str, ranks: int) -> "Results":
        """The rows of one operation on so many ranks."""
        return Results(tuple(row for row in self.rows if (row.operation, row.ranks) == (operation, ranks)))

    def series(self) -> dict[str, "Results"]:
        """The rows of each operation, backend and number of ranks, by their `key`, smallest size first."""
        found: dict[str, list[Row]] = {}
        for row in sorted(self.rows, key=lambda row: row.size):
            found.setdefault(key(row.operation, row.backend, row.ranks), []).append(row)
        return {name: Results(tuple(rows)) for name, rows in sorted(found.items())}

    def fit(self) -> AlphaBeta:
        """Fit T = α + β·S to these rows, which should be one series. Raises ValueError as `alpha_beta.fit` does."""
        return fit([row.nbytes for row in self.rows], [row.seconds.median for row in self.rows])

    def fits(self) -> tuple[dict[str, AlphaBeta], dict[str, str]]:
        """The fit of each series that has one, and for the others the reason why not."""
        found, missing = {}, {}
        for name, series in self.series().items():
            try:
                found[name] = series.fit()
            except ValueError as error:
                missing[name] = str(error)
        return found, missing

    def __str__(self) -> str:
        """A Markdown table that reads well as text. An operation or backend common to all rows stands above it."""
        columns = {head: [cell(row) for row in self.rows] for head, cell in _COLUMNS.items()}
        above = [columns.pop(head)[0] for head in _TEXTS if len(set(columns[head])) == 1]
        lines = ["" for _ in range(len(self.rows) + 2)]
        for head, cells in columns.items():
            width = max(map(len, [head, *cells]))
            pad = str.ljust if head in _TEXTS else str.rjust
            for line, cell in enumerate([pad(head, width), "-" * width, *(pad(cell, width) for cell in cells)]):
                lines[line] += f"|-{cell}-" if line == 1 else f"| {cell} "
        table = "\n".join(f"{line}|" for line in lines)
        return f"{', '.join(above)}:\n\n{table}" if above else table


def _time(row: Row) -> str:
    median, low, high = (three_digits(1e3 * each) for each in (row.seconds.median, row.seconds.low, row.seconds.high))
    return f"{median} [{low}–{high}]"


def _published(row: Row) -> str:
    rate = row.published
    return "" if rate is None else f"{three_digits(rate / 1e9)} ({three_digits(rate / 2**30)})"


_TEXTS = ("operation", "backend")  # to the left; numbers to the right
_COLUMNS: dict[str, Callable[[Row], str]] = {
    "operation": lambda row: row.operation,
    "ranks": lambda row: str(row.ranks),
    "backend": lambda row: row.backend,
    "size": lambda row: format_size(row.size),
    "time, ms": _time,
    "calls": lambda row: f"{row.samples} × {row.calls}",
    "algbw, GB/s": lambda row: three_digits(row.algbw / 1e9),
    "busbw, GB/s": lambda row: three_digits(row.busbw / 1e9),
    "2·S/t, GB/s (GiB/s)": _published,
}
