"""The step's seconds by bucket size: a U between one message per gradient and one message for all gradients."""

from collections.abc import Mapping
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from scratch_ddp.course.plots.style import GREY, QUIET, draw_quiet_axes, rank_color

_SIDE = 2.1  # distance of the two ends from the sizes, as a ratio of sizes


@dataclass(frozen=True)
class Sweep:
    """Seconds of a step. `buckets`: by bucket size in MB, in ascending order.

    `per_parameter`: one message per gradient, as soon as it is ready; `flat`: one message for all gradients, after
    backward; `compute`: a step without communication; `best`: the best size, and its step.
    """

    buckets: Mapping[float, float]
    per_parameter: float
    flat: float
    compute: float
    best: tuple[float, float]


def bucket_sweep(forecasts: Mapping[str, Sweep], measured: Mapping[str, Mapping[float, float]] | None = None) -> Figure:
    """A line per forecast with its best size marked; measured steps (seconds by MB) of the same names are dots.

    Beside the sizes stand the alternatives to buckets: one message per gradient at the left, one for all at the right.
    Raises ValueError for dots without a line.
    """
    if unknown := [name for name in measured or {} if name not in forecasts]:
        raise ValueError(f"{unknown[0]!r} was measured, but there is no forecast of it")
    figure, panel = plt.subplots(figsize=(7.6, 4.4), layout="constrained")
    sizes = sorted({size for sweep in forecasts.values() for size in sweep.buckets})
    ends = sizes[0] / _SIDE, sizes[-1] * _SIDE
    for number, (name, sweep) in enumerate(forecasts.items()):
        _draw_forecast(panel, name, sweep, ends, rank_color(number))
        for size, seconds in (measured or {}).get(name, {}).items():
            panel.plot(size, seconds, "o", ms=8, color=rank_color(number), mec="white", mew=1.2, zorder=4)
    computes = {sweep.compute for sweep in forecasts.values()}
    for compute in computes:
        panel.axhline(compute, color=GREY, lw=0.9, ls=(0, (1, 2)))
    panel.annotate(
        "compute alone", (sizes[0], min(computes)), (0, 4), textcoords="offset points", fontsize=8, color=GREY
    )
    panel.set_ylim(bottom=min(computes) * 0.94)
    _label(panel, sizes, ends)
    handles, names = panel.get_legend_handles_labels()
    handles, names = [*handles, _legend_mark("*", 11)], [*names, "best size"]
    if measured:
        handles, names = [*handles, _legend_mark("o", 8)], [*names, "measured"]
    panel.legend(handles, names, loc="upper center", fontsize=8, frameon=False, ncols=2)
    return figure


def _draw_forecast(panel: Axes, name: str, sweep: Sweep, ends: tuple[float, float], color: str) -> None:
    panel.plot(list(sweep.buckets), list(sweep.buckets.values()), color=color, lw=1.8, label=f"forecast: {name}")
    panel.plot(*sweep.best, "*", ms=15, color=color, mec="white", mew=0.8, zorder=5)
    for end, seconds in zip(ends, (sweep.per_parameter, sweep.flat), strict=True):
        panel.plot([end / 1.25, end * 1.25], [seconds, seconds], color=color, lw=3.2, solid_capstyle="butt")


def _legend_mark(marker: str, size: float) -> plt.Line2D:
    return plt.Line2D([], [], ls="", marker=marker, ms=size, color=GREY, mec="white")


def _label(panel: Axes, sizes: list[float], ends: tuple[float, float]) -> None:
    panel.set_xscale("log")
    panel.set_xlim(ends[0] / 1.5, ends[1] * 1.5)
    powers = [10**power for power in range(-3, 7) if sizes[0] <= 10**power <= sizes[-1]]
    names = {ends[0]: "one per\ngradient", ends[1]: "one\nfor all"} | {power: f"{power:g}" for power in powers}
    panel.xaxis.set_major_locator(FixedLocator(sorted(names)))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(
        lambda size, _: next(text for at, text in names.items() if abs(at / size - 1) < 1e-6)
    )
    for place in (sizes[0] / _SIDE**0.5, sizes[-1] * _SIDE**0.5):
        panel.axvline(place, color=QUIET, lw=0.8)
    panel.set_xlabel("size of a bucket, MB", fontsize=9)
    panel.set_ylabel("step, seconds", fontsize=9)
    panel.grid(axis="y", color=QUIET, lw=0.4, alpha=0.6)
    draw_quiet_axes(panel, tick_length=3)
