"""What every command of the benchmark shares: the numbers of its options, the table that it prints, its exit status."""

import argparse
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scratch_ddp.instruments.timing import Sample, ratio

REPORTED = "reported"  # in place of a target


def positive_count(text: str) -> int:
    """`type=` of an option: a whole number, 1 or more. argparse refuses others with status 2, before anything runs."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number, 1 or more, is needed, not {text!r}")
    return int(text)


def positive_seconds(text: str) -> float:
    """`type=` of an option: a finite number of seconds, more than 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:  # also false for nan
        raise argparse.ArgumentTypeError(f"a number of seconds, more than 0, is needed, not {text!r}")
    return value


@dataclass
class TableRow:
    """What was measured, the target, the result in words, and whether it meets the target."""

    what: str
    must: str
    measured: str
    holds: bool


def cpu_row(
    what: str, samples: Sequence[Sample], reference: Sequence[Sample], must: str, most: float | None = None
) -> TableRow:
    """CPU time in units of the reference's, which must be at most `most` if that is given; wall time likewise."""
    cpu, wall = (ratio(samples, reference, figure) for figure in ("cpu", "wall"))
    return TableRow(what, must, f"{cpu} of the CPU time, {wall} of the time", most is None or cpu.median <= most)


def report(rows: Sequence[TableRow], before: str = "", after: str = "") -> int:
    """Print the rows between two texts. Return the exit status: 1 if a row misses its target."""
    print("\n\n".join(filter(None, (before, markdown(rows), after))))
    return 0 if all(row.holds for row in rows) else 1


def markdown(rows: Iterable[TableRow]) -> str:
    """The rows as a table of Markdown."""
    lines = ["| what | must | measured | |", "|---|---|---|---|"]
    lines += [f"| {row.what} | {row.must} | {row.measured} | {'✓' if row.holds else '✗'} |" for row in rows]
    return "\n".join(lines)


def median_and_range(seconds: Iterable[float]) -> str:
    """ "1.02 s (0.98–1.30)": median, smallest and largest."""
    values = sorted(seconds)
    return f"{statistics.median(values):.3g} s ({values[0]:.3g}–{values[-1]:.3g})"
