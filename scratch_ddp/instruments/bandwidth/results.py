"""The results of timing collectives: times, three kinds of bandwidth, fits, a table."""

from collections.abc import Iterator
from dataclasses import dataclass

from scratch_ddp.instruments.bandwidth.alpha_beta import AlphaBeta, fit, key
from scratch_ddp.instruments.bandwidth.operations import OPERATIONS
from scratch_ddp.instruments.sizes import format_size, three_digits
from scratch_ddp.instruments.timing import Spread

LEGEND = (
    "Sizes: 1 MiB = 2^20 bytes, 1 MB = 10^6. Times: median [quartiles] over the samples, of the slowest rank. "
    "1 GB/s = 10^9 bytes per second, 1 GiB/s = 2^30. algbw = S/t, busbw = factor·S/t as in nccl-tests; "
    "2·S/t is what the article published, in GiB/s, though it says GB/s."
)
HEAD = ("operation", "ranks", "backend", "size", "time, ms", "calls")
HEAD += ("algbw, GB/s", "busbw, GB/s", "2·S/t, GB/s (GiB/s)")
TEXT_COLUMNS = (HEAD.index("operation"), HEAD.index("backend"))


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

    def __len__(self) -> int:
        return len(self.rows)

    def of(self, operation: str = "all_reduce", ranks: int | None = None, backend: str | None = None) -> "Results":
        """The rows of one operation, and of one number of ranks or one backend where these are given."""
        wanted = [
            row
            for row in self.rows
            if row.operation == operation and ranks in (None, row.ranks) and backend in (None, row.backend)
        ]
        return Results(tuple(wanted))

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
        rows = [HEAD, *map(_cells, self.rows)]
        above = [i for i in TEXT_COLUMNS if len({row[i] for row in rows[1:]}) == 1]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        shown = [i for i in range(len(HEAD)) if i not in above]
        lines = [" | ".join(_padded(row[i], widths[i], i in TEXT_COLUMNS) for i in shown) for row in rows]
        lines.insert(1, "-|-".join("-" * widths[i] for i in shown))
        table = "\n".join(f"| {line} |" if i != 1 else f"|-{line}-|" for i, line in enumerate(lines))
        return f"{', '.join(rows[1][i] for i in above)}:\n\n{table}" if above else table


def _cells(row: Row) -> tuple[str, ...]:
    middle, low, high = (three_digits(1e3 * each) for each in (row.seconds.median, row.seconds.low, row.seconds.high))
    published = ""
    if row.published is not None:
        published = f"{three_digits(row.published / 1e9)} ({three_digits(row.published / 2**30)})"
    return (
        row.operation,
        str(row.ranks),
        row.backend,
        format_size(row.size),
        f"{middle} [{low}–{high}]",
        f"{row.samples} × {row.calls}",
        three_digits(row.algbw / 1e9),
        three_digits(row.busbw / 1e9),
        published,
    )


def _padded(cell: str, width: int, is_text: bool) -> str:
    """Text to the left, numbers to the right."""
    return cell.ljust(width) if is_text else cell.rjust(width)
