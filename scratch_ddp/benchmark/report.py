"""A table of what was measured beside what it must be."""

import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass
class Figure:
    """One row: what was measured, the target, the result in words, and whether it meets the target."""

    what: str
    must: str
    measured: str
    holds: bool


def machine() -> str:
    """ "2 cores, load 0.3 at the start": where a measurement ran, and how busy it was in the minute before."""
    return f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start"


def markdown(figures: Iterable[Figure]) -> str:
    """The rows as a table of Markdown."""
    rows = ["| what | must | measured | |", "|---|---|---|---|"]
    rows += [f"| {row.what} | {row.must} | {row.measured} | {'✓' if row.holds else '✗'} |" for row in figures]
    return "\n".join(rows)


def spread(seconds: Sequence[float], unit: str = "s") -> str:
    """ "1.02 s (0.98–1.30)": median, smallest and largest."""
    scale = {"s": 1.0, "ms": 1e3}[unit]
    values = sorted(scale * second for second in seconds)
    return f"{statistics.median(values):.3g} {unit} ({values[0]:.3g}–{values[-1]:.3g})"


def three_digits(value: float) -> str:
    """Three significant digits, and no exponent for what is larger: "0.00324", "12.4", "2,090"."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{float(f'{value:.3g}'):,.0f}"
