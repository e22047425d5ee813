"""Times and bandwidths of collectives by size of the tensor."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from scratch_ddp.course.plots.style import GREY, QUIET, draw_quiet_axes, rank_color
from scratch_ddp.instruments.bandwidth import AlphaBeta, Results
from scratch_ddp.instruments.sizes import format_size

BANDWIDTHS = {"algbw": "algbw: S/t", "busbw": "busbw: {} · S/t", "published": "as published: 2 · S/t"}
_MARKERS = "osD^vPX*"
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def time_chart(
    results: Results, fits: Mapping[str, AlphaBeta] | None = None, others: Mapping[str, AlphaBeta] | None = None
) -> Figure:
    """A line per operation, backend and number of ranks: median time by size, on logarithmic axes.

    The bars show the quartiles. `fits`, by the names of `Results.series`, are dashed lines. `others`, by any names, are
    thin grey lines to compare with, with their names at the right.
    """
    figure, panel = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    sizes = sorted({row.size for row in results})
    for number, (name, series) in enumerate(results.series().items()):
        medians = [row.seconds.median for row in series]
        spread = [
            [row.seconds.median - row.seconds.low for row in series],
            [row.seconds.high - row.seconds.median for row in series],
        ]
        sizes_of_series = [row.size for row in series]
        panel.errorbar(sizes_of_series, medians, yerr=spread, capsize=2, label=name, **_line_style(number))
        if fits and name in fits:
            line = [fits[name].seconds(size) for size in _between(sizes)]
            panel.plot(_between(sizes), line, "--", color=rank_color(number), lw=1)
    for name, other in (others or {}).items():
        panel.plot(_between(sizes), [other.seconds(size) for size in _between(sizes)], color=GREY, lw=0.9, zorder=1)
        end = (1.02, other.seconds(sizes[-1]))
        panel.annotate(name, end, xycoords=panel.get_yaxis_transform(), fontsize=8, color=GREY, va="center")
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(lambda seconds, _: _format_seconds(seconds))
    panel.set_ylabel("time per call", fontsize=9)
    _finish(panel, sizes)
    handles, names = panel.get_legend_handles_labels()
    if fits:
        handles.append(plt.Line2D([], [], ls="--", lw=1, color=GREY))
        names.append("α + β·S")
    figure.legend(handles, names, loc="outside lower left", ncols=2, fontsize=8, frameon=False)
    return figure


def bandwidth_chart(results: Results, kinds: Sequence[str] = tuple(BANDWIDTHS)) -> Figure:
    """A panel per kind of bandwidth ("algbw", "busbw", "published") with the lines of `time_chart`, in GB/s.

    "published" is drawn for all-reduces alone. All panels have the same scale. Raises ValueError for another kind.
    """
    if unknown := [kind for kind in kinds if kind not in BANDWIDTHS]:
        raise ValueError(f"no bandwidth is called {unknown[0]!r}; there are {', '.join(BANDWIDTHS)}")
    kinds = [kind for kind in kinds if any(getattr(row, kind) is not None for row in results)]
    all_reduces = all(row.operation.endswith("all_reduce") for row in results)
    factor = "2(n−1)/n" if all_reduces else "factor"  # other operations have other factors
    width = 3.1 * len(kinds) + 0.6
    figure, axes = plt.subplots(1, len(kinds), figsize=(width, 3.9), sharey=True, squeeze=False, layout="constrained")
    sizes = sorted({row.size for row in results})
    for panel, kind in zip(axes.flat, kinds, strict=True):
        for number, (name, series) in enumerate(results.series().items()):
            points = [(row.size, getattr(row, kind)) for row in series if getattr(row, kind) is not None]
            rates = [rate / 1e9 for _, rate in points]
            panel.plot([size for size, _ in points], rates, label=name, **_line_style(number))
        panel.set_title(BANDWIDTHS[kind].format(factor), fontsize=10, loc="left")
        _finish(panel, sizes)
    axes[0, 0].set_ylim(bottom=0)  # of all panels
    axes[0, 0].set_ylabel("GB/s (10⁹ bytes per second)", fontsize=9)
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower left", ncols=max(1, round(width / 3.2)), fontsize=8, frameon=False)
    return figure


def _line_style(number: int) -> dict[str, Any]:
    return {"color": rank_color(number), "marker": _MARKERS[number % len(_MARKERS)], "ms": 5, "lw": 1.4}


def _between(sizes: Sequence[int], steps: int = 60) -> list[float]:
    """Sizes from the smallest to the largest, at equal ratios."""
    ratio = max(sizes) / min(sizes)
    return [min(sizes) * ratio ** (step / steps) for step in range(steps + 1)]


def _format_seconds(seconds: float) -> str:
    scale, unit = next((each for each in _UNITS if seconds >= 0.999 * each[0]), _UNITS[-1])
    return f"{seconds / scale:g} {unit}"


def _finish(panel: Axes, sizes: Sequence[int]) -> None:
    panel.set_xscale("log")
    shown = sizes if len(sizes) <= 8 else sizes[:: -(-len(sizes) // 8)]
    panel.xaxis.set_major_locator(FixedLocator(shown))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(lambda size, _: format_size(round(size)).replace(" ", "\n"))
    panel.set_xlabel("size of the tensor, S", fontsize=9)
    panel.grid(color=QUIET, lw=0.4, alpha=0.6)
    draw_quiet_axes(panel, tick_length=3)
