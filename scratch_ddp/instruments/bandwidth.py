"""Bandwidth: how long an all-reduce takes on these ranks, and the α and β of its messages.

`measure()` times it over tensor sizes and numbers of ranks. Its `Results` print a table with bandwidths as NVIDIA's
nccl-tests define them (doc/PERFORMANCE.md), and fit T = α + β·S. As a command on ranks of its own:
`python -m scratch_ddp.benchmark collectives`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

import numpy as np
import torch
import torch.distributed as dist

from scratch_ddp.collectives.checked import member_group
from scratch_ddp.common.agreement import message_device
from scratch_ddp.instruments.sizes import format_size, parse_size, three_digits
from scratch_ddp.instruments.timing import Spread, interleaved, spread_of

SIZES = ("1KiB", "10KiB", "100KiB", "1MiB", "10MiB", "100MiB", "1GiB")
SAMPLE = 0.002  # seconds: several shorter calls make one sample, or the ranks' common start would distort it
LEAST, MOST = 3, 50  # samples per row
_FLOAT = 4  # bytes of a float32
_HEADS = ("ranks", "size", "time, ms", "calls", "algbw, GB/s", "busbw, GB/s", "2·S/t, GB/s (GiB/s)")


@dataclass(frozen=True)
class AlphaBeta:
    """T(S) = alpha + beta·S, in seconds. `worst`: by what share it is off the times that it was fitted to, at most."""

    alpha: float
    beta: float
    worst: float = 0.0

    def seconds(self, size: float) -> float:
        """Seconds for a message of `size` bytes, by the line."""
        return self.alpha + self.beta * size

    def __str__(self) -> str:
        rate = f"{three_digits(1e-9 / self.beta)} GB/s" if self.beta else "no limit"
        line = f"α = {three_digits(self.alpha * 1e6)} µs, β = {three_digits(self.beta * 1e9)} ns per byte ({rate})"
        return f"{line}, off by at most {self.worst:.0%}"


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> AlphaBeta:
    """Fit α and β by least squares of relative residuals. Raises ValueError for too few sizes, or a negative α or β."""
    if len(set(sizes)) < 3:
        raise ValueError(f"{len(set(sizes))} sizes are too few for a line: measure 3 or more")
    size, time = np.array(sizes, dtype=float), np.array(seconds)
    beta, alpha = np.polyfit(size, time, deg=1, w=1 / time).tolist()
    if alpha <= 0 or beta <= 0:
        what, hint = ("β", "larger") if beta <= 0 else ("α", "smaller")
        raise ValueError(f"the line has a negative {what}: measure {hint} sizes too, and for longer")
    return AlphaBeta(alpha, beta, float(np.abs(1 - (alpha + beta * size) / time).max()))


@dataclass(frozen=True)
class Row:
    """All-reduces of `size` bytes: `seconds` per call, over `samples` samples of `calls` calls. Bandwidths: bytes/s."""

    backend: str
    ranks: int
    size: int
    seconds: Spread
    samples: int
    calls: int

    @property
    def algbw(self) -> float:
        """S/t, "algorithm bandwidth": how fast the operation is, regardless of the bytes it moves."""
        return self.size / self.seconds.median

    @property
    def busbw(self) -> float:
        """2(n-1)/n·S/t: what a link carries. Comparable across n."""
        return 2 * (self.ranks - 1) / self.ranks * self.algbw

    @property
    def published(self) -> float:
        """2·S/t: what a link carries for infinite n. For 2 ranks that is twice too much."""
        return 2 * self.algbw

    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        median, low, high = (three_digits(1e3 * each) for each in astuple(self.seconds))
        algbw, busbw, published = (three_digits(each / 1e9) for each in (self.algbw, self.busbw, self.published))
        took = f"{median} [{low}–{high}]", f"{self.samples} × {self.calls}"
        rates = algbw, busbw, f"{published} ({three_digits(self.published / 2**30)})"
        return str(self.ranks), format_size(self.size), *took, *rates


class Results(tuple[Row, ...]):
    """All rows of a run, the same on every rank, in the order of ranks and sizes."""

    def of(self, ranks: int) -> "Results":
        """The rows of so many ranks."""
        return Results(row for row in self if row.ranks == ranks)

    def series(self) -> dict[str, "Results"]:
        """The rows of each number of ranks, by a name such as "all_reduce, gloo, 2 ranks"."""
        names = {f"all_reduce, {row.backend}, {row.ranks} ranks": row.ranks for row in self}
        return {name: self.of(ranks) for name, ranks in names.items()}

    def fit(self) -> AlphaBeta:
        """Fit T = α + β·S to these rows, which should be one series. Raises ValueError as `fit` does."""
        return fit([row.size for row in self], [row.seconds.median for row in self])

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
        """A Markdown table that reads well as text."""
        table = [_HEADS, *(row.cells() for row in self)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["| " + " | ".join(map(str.rjust, cells, widths)) + " |" for cells in table]
        lines.insert(1, "|-" + "-|-".join("-" * width for width in widths) + "-|")
        return "\n".join([f"all_reduce, {self[0].backend}:", "", *lines])


def measure(
    sizes: Iterable[int | str] = SIZES,
    ranks: Sequence[int] | None = None,
    seconds: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> Results:
    """Time torch's all-reduce of float32 tensors of each size, and return all rows.

    Collective: every rank of `group` calls it with the same arguments and gets the same rows. `sizes`: bytes, or texts
    such as "10MiB". `ranks`: numbers of ranks, from rank 0 on (of the default group); by default, all. `seconds`: about
    how long each row may take. The tensors are on a GPU where the backend requires one, else in main memory. The ranks
    start each sample together, and its time is that of the slowest rank.

    Raises ValueError for a text that is no size, and for more ranks than there are.
    """
    __tracebackhide__ = True
    group = member_group(group)
    whole = [parse_size(size) // _FLOAT * _FLOAT for size in sizes]
    rows: list[Row] = []
    for n in ranks or [group.size()]:
        is_part = n != group.size()
        members = dist.new_group(list(range(n)), backend=dist.get_backend(group)) if is_part else group
        if group.rank() < n:
            rows += [_timed(size, members, seconds) for size in whole]
            if is_part:
                dist.destroy_process_group(members)
    shared = [rows]
    dist.broadcast_object_list(shared, group=group, group_src=0)
    return Results(shared[0])


def _timed(size: int, group: dist.ProcessGroup, seconds: float) -> Row:
    # Filled, so that its pages exist: touching a page for the first time takes longer than a message.
    tensor = torch.zeros(size // _FLOAT, device=message_device(group)).fill_(0)

    def take(calls: int, rounds: int, warm_up: int) -> Spread:
        def several() -> None:
            for _ in range(calls):
                dist.all_reduce(tensor, group=group)

        samples = interleaved({"": several}, rounds, warm_up, group)[""]
        return spread_of([each.wall / calls for each in samples])

    probe = take(calls=1, rounds=3, warm_up=1)
    calls = math.ceil(min(SAMPLE / probe.low, 1000))
    samples = min(max(int(seconds / (calls * probe.median)), LEAST), MOST)
    spread = take(calls, samples, warm_up=0)
    return Row(dist.get_backend(group), group.size(), size, spread, samples, calls)
