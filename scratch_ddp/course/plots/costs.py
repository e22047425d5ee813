"""Seconds and bytes, forecast and measured: of collectives, buckets and layouts, and which bound binds."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from importlib.util import find_spec
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, FormatStrFormatter, LogLocator, NullLocator

from scratch_ddp.course.plots.style import GREY, QUIET, SENT_COLOR, SUM_COLOR, quiet, rank_color, titled_panels
from scratch_ddp.instruments.bandwidth import AlphaBeta, Results
from scratch_ddp.instruments.cost import BOUNDS, CLUSTERS, MODELS, RankMemory, what_binds
from scratch_ddp.instruments.sizes import format_size


@quiet
def time_chart(
    results: Results, fits: Mapping[str, AlphaBeta] | None = None, others: Mapping[str, AlphaBeta] | None = None
) -> Figure:
    """A line per operation, backend and number of ranks: median time by size, on logarithmic axes.

    The bars show the quartiles. `fits`, by the names of `Results.series`, are dashed lines. `others`, by any names, are
    thin grey lines to compare with, with their names at the right.
    """
    figure, panel = plt.subplots(figsize=(6.4, 4.2))
    sizes = sorted({row.size for row in results})
    between = np.geomspace(sizes[0], sizes[-1])
    for number, (name, series) in enumerate(results.series().items()):
        low, median, high = np.array([(row.seconds.low, row.seconds.median, row.seconds.high) for row in series]).T
        spread = [median - low, high - median]
        panel.errorbar([row.size for row in series], median, spread, capsize=2, label=name, **_line_style(number))
        if fits and name in fits:
            panel.plot(between, fits[name].seconds(between), "--", color=rank_color(number), lw=1)
    for name, other in (others or {}).items():
        panel.plot(between, other.seconds(between), color=GREY, lw=0.9, zorder=1)
        end = (1.02, other.seconds(sizes[-1]))
        panel.annotate(name, end, xycoords=panel.get_yaxis_transform(), fontsize=8, color=GREY, va="center")
    if fits:
        panel.plot([], [], "--", lw=1, color=GREY, label="α + β·S")
    panel.set(yscale="log", ylabel="time per call")
    panel.yaxis.set_major_formatter(EngFormatter("s"))
    _label_sizes(panel, sizes)
    figure.legend(loc="outside lower left", ncols=2)
    return figure


@quiet
def bandwidth_chart(results: Results) -> Figure:
    """A panel per kind of bandwidth (algbw, busbw, as published) with the lines of `time_chart`, in GB/s.

    The published kind is drawn for all-reduces alone. All panels have the same scale.
    """
    all_reduces = [row.operation.endswith("all_reduce") for row in results]
    factor = "2(n−1)/n" if all(all_reduces) else "factor"  # other operations have other factors
    kinds = {"algbw: S/t": "algbw", f"busbw: {factor} · S/t": "busbw"}
    kinds |= {"as published: 2 · S/t": "published"} if any(all_reduces) else {}
    width = 3.1 * len(kinds) + 0.6
    figure, panels = titled_panels(kinds, (width, 3.9), sharey=True)
    for panel, kind in panels:
        for number, (name, series) in enumerate(results.series().items()):
            rates = {row.size: getattr(row, kind) / 1e9 for row in series if getattr(row, kind) is not None}
            panel.plot(list(rates), list(rates.values()), label=name, **_line_style(number))
        _label_sizes(panel, sorted({row.size for row in results}))
    figure.axes[0].set(ylabel="GB/s (10⁹ bytes per second)", ylim=(0, None))
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower left", ncols=max(1, round(width / 3.2)))
    return figure


def _line_style(number: int) -> dict[str, Any]:
    return {"color": rank_color(number), "marker": "osD^vPX*"[number % 8], "ms": 5, "lw": 1.4}


def _label_sizes(panel: Axes, sizes: Sequence[int]) -> None:
    """At most eight."""
    shown = sizes[:: -(-len(sizes) // 8)]
    panel.set(xscale="log", xlabel="size of the tensor, S")
    panel.set_xticks(shown, [format_size(size).replace(" ", "\n") for size in shown])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.grid(color=QUIET, lw=0.4, alpha=0.6)


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


@quiet
def bucket_sweep(forecasts: Mapping[str, Sweep], measured: Mapping[str, Mapping[float, float]]) -> Figure:
    """A line per forecast with its best size marked; measured steps (seconds by MB) of the same names are dots.

    Beside the sizes stand the alternatives to buckets: one message per gradient at the left, one for all at the right.
    """
    figure, panel = plt.subplots(figsize=(7.6, 4.4))
    sizes = sorted({size for sweep in forecasts.values() for size in sweep.buckets})
    ends = sizes[0] / 2.1, sizes[-1] * 2.1
    for number, (name, sweep) in enumerate(forecasts.items()):
        color, dots = rank_color(number), measured.get(name, {})
        panel.plot(list(sweep.buckets), list(sweep.buckets.values()), color=color, lw=1.8, label=f"forecast: {name}")
        panel.plot(*sweep.best, "*", ms=15, color=color, mec="white", mew=0.8, zorder=5)
        panel.plot(list(dots), list(dots.values()), "o", ms=8, color=color, mec="white", mew=1.2, zorder=4)
        for end, seconds in zip(ends, (sweep.per_parameter, sweep.flat), strict=True):
            panel.plot([end / 1.25, end * 1.25], [seconds, seconds], color=color, lw=3.2, solid_capstyle="butt")
        panel.axhline(sweep.compute, color=GREY, lw=0.9, ls=(0, (1, 2)))
    for marker, size, name in (("*", 11, "best size"), ("o", 8, "measured")):
        panel.plot([], [], marker, ms=size, color=GREY, mec="white", label=name)
    lowest = min(sweep.compute for sweep in forecasts.values())
    above = {"xytext": (0, 4), "textcoords": "offset points"}
    panel.annotate("compute alone", (sizes[0], lowest), fontsize=8, color=GREY, **above)
    for place in (sizes[0] / 2.1**0.5, sizes[-1] * 2.1**0.5):
        panel.axvline(place, color=QUIET, lw=0.8)
    panel.set(xscale="log", xlabel="size of a bucket, MB", ylabel="step, seconds")
    panel.set(xlim=(ends[0] / 1.5, ends[1] * 1.5), ylim=(0.94 * lowest, None))
    powers = [10**power for power in range(-3, 7) if sizes[0] <= 10**power <= sizes[-1]]
    panel.set_xticks(
        [ends[0], *powers, ends[1]], ["one per\ngradient", *(f"{each:g}" for each in powers), "one\nfor all"]
    )
    panel.xaxis.set_minor_locator(NullLocator())
    panel.grid(axis="y", color=QUIET, lw=0.4, alpha=0.6)
    panel.legend(loc="upper center", ncols=2)
    return figure


@quiet
def forecast_curve(
    tokens: Sequence[int], forecast: Sequence[float], measured: Mapping[int, float], knee: float, compute: float
) -> Figure:
    """Seconds of a step for each token a device has: a line, and dots where it was measured.

    `knee`: the tokens from which on the step is compute-bound; `compute`: seconds of computing for a token.
    """
    figure, panel = plt.subplots(figsize=(6.4, 3.2))
    panel.plot(tokens, [1e3 * each / t for t, each in zip(tokens, forecast, strict=True)], color=SUM_COLOR, lw=1.4)
    places = [1e3 * seconds / t for t, seconds in measured.items()]
    panel.plot(list(measured), places, "o", color=rank_color(0), label="measured")
    panel.axhline(1e3 * compute, color=GREY, lw=1, ls="--", label="computing alone")
    panel.axvline(knee, color=SENT_COLOR, lw=1, label="compute-bound from here on")
    panel.set(xscale="log", xlabel="tokens of a device", ylabel="ms of a step for each", ylim=(0, None))
    panel.set_xticks(list(measured), [str(each) for each in measured])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.legend()
    return figure


@quiet
def forecast_diagonal(forecast: Mapping[str, float], measured: Mapping[str, float]) -> Figure:
    """A dot for each layout: forecast milliseconds against measured ones. On the line they are the same."""
    figure, panel = plt.subplots(figsize=(6.4, 3.8))
    values = [1e3 * each for each in (*forecast.values(), *measured.values())]
    ends = 0.85 * min(values), 1.18 * max(values)
    panel.plot(ends, ends, color=GREY, lw=1)
    for number, name in enumerate(sorted(measured, key=forecast.__getitem__)):
        panel.plot(1e3 * forecast[name], 1e3 * measured[name], "o", color=rank_color(number), label=name)
    panel.set(xscale="log", yscale="log", xlabel="forecast, ms", ylabel="measured, ms", xlim=ends, ylim=ends)
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FormatStrFormatter("%g"))
        axis.set_minor_locator(NullLocator())
    panel.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


Steps = Mapping[str, Mapping[str, float]]  # link -> way -> seconds


@quiet
def ways_on_links(measured: Steps, forecast: Steps, alone: float) -> Figure:
    """A group for each link, in it a column for each way: `alone` / measured. A black line across it is the forecast.

    `alone`: seconds of a step on one GPU, which is the dashed line at 1; the one at 2, for two GPUs, is what can be
    hoped for.
    """
    figure, panel = plt.subplots(figsize=(8.2, 3.8))
    ways = list(next(iter(measured.values())))
    width = 0.8 / len(ways)
    for number, way in enumerate(ways):
        for group, link in enumerate(measured):
            place, speed = group + (number - (len(ways) - 1) / 2) * width, alone / measured[link][way]
            panel.bar(place, speed, 0.9 * width, color=rank_color(number), label=way if group == 0 else None)
            above, ink = (-13, "white") if speed > 0.5 else (4, "black")  # inside where there is room for it
            style = {"textcoords": "offset points", "ha": "center", "fontsize": 8, "color": ink}
            panel.annotate(f"{speed:.2f}", (place, speed), (0, above), **style)
            expected = alone / forecast[link][way]
            panel.hlines(expected, place - 0.45 * width, place + 0.45 * width, color="black", lw=1.4)
    for speed in (1, 2):
        panel.axhline(speed, color=GREY, lw=1, ls="--", zorder=0)
    panel.plot([], [], color="black", lw=1.4, label="forecast")
    panel.set_xticks(range(len(measured)), list(measured))
    panel.set(ylabel="times as fast as one GPU", ylim=(0, 2.5))
    panel.legend(loc="upper center", ncols=len(ways) + 1)
    return figure


@quiet
def memory_bars(memories: Mapping[str, RankMemory], room: float) -> Figure:
    """A bar per name, in 10⁹ bytes, with the parts of `RankMemory` side by side; a dashed line at `room` bytes.

    The total stands behind each bar, red if it is more than there is room for. The axis ends at three times the room:
    a longer bar is cut off there.
    """
    figure, panel = plt.subplots(figsize=(8.2, 0.42 * len(memories) + 1.3))
    totals = [each.total for each in memories.values()]
    end = min(3 * room, 1.15 * max(room, *totals)) / 1e9
    starts = np.zeros(len(memories))
    for number, part in enumerate(field.name for field in fields(RankMemory)):
        widths = np.array([getattr(each, part) / 1e9 for each in memories.values()])
        if widths.any():
            panel.barh(range(len(memories)), widths, 0.68, starts, color=rank_color(number), label=part)
        starts += widths
    for place, total in enumerate(totals):
        color = SENT_COLOR if total > room else SUM_COLOR
        panel.text(min(total / 1e9, end), place, f" {total / 1e9:,.3g} GB", va="center", fontsize=8, color=color)
    panel.axvline(room / 1e9, color=SUM_COLOR, lw=1, ls="--")
    panel.text(room / 1e9, -0.62, " room", fontsize=8, color=SUM_COLOR, va="center")
    panel.set_yticks(range(len(memories)), list(memories))
    panel.set(xlabel="GB of a rank", xlim=(0, end), ylim=(len(memories) - 0.45, -0.85))
    figure.legend(ncols=7, loc="outside lower center")
    return figure


@quiet
def bound_map(
    panels: Mapping[str, Callable[[int, int], str]], devices: Sequence[int], batches: Sequence[int], sequence: int
) -> Figure:
    """A map for each name: its function gets (devices, sequences in a step) and returns one of BOUNDS.

    The axes are powers of two; the batch is shown in tokens, `sequence` to a sequence.
    """
    figure, drawn = titled_panels(panels, (3.4 * len(panels) + 0.9, 3.9), sharey=True)
    colors = dict(zip(BOUNDS, ("#8cc08a", "#f2b27a", "#b89acb", "#e39a9d", "#e4e4e4"), strict=True))
    style = {"cmap": ListedColormap(list(colors.values())), "vmin": -0.5, "vmax": len(BOUNDS) - 0.5}
    for panel, binds in drawn:
        grid = [[BOUNDS.index(binds(n, batch)) for n in devices] for batch in batches]
        panel.imshow(grid, origin="lower", aspect="auto", **style)
        panel.set_xticks(range(0, len(devices), 2), [f"{n:,}" for n in devices[::2]])
        panel.set_xlabel("devices")
        panel.spines[:].set_visible(True)
    tokens = [batch * sequence for batch in batches[::2]]
    names = [f"{n / 2**20:g} Mi" if n >= 2**20 else f"{n / 2**10:g} Ki" for n in tokens]
    figure.axes[0].set_yticks(range(0, len(batches), 2), names)
    figure.axes[0].set_ylabel("tokens in a step")
    handles = [Patch(color=color, label=name) for name, color in colors.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return figure


def bound_sliders() -> Figure | None:
    """Show the map with sliders for the model, the cluster, tp and checkpointing. Return a Figure where it can't be.

    JupyterLab names the notebook in the kernel's environment; a run without a browser, as for saving outputs, does not.
    """
    if "JPY_SESSION_NAME" not in os.environ or not find_spec("ipywidgets"):
        return _one_map()
    import ipywidgets

    dense = [name for name, shape in MODELS.items() if not shape.experts]
    tp = ipywidgets.SelectionSlider(options=[1, 2, 4, 8], value=8)
    ipywidgets.interact(_one_map, model=dense, cluster=list(CLUSTERS), tp=tp, checkpointing=True)
    return None


def _one_map(model: str = "XXL", cluster: str = "H100", tp: int = 8, checkpointing: bool = True) -> Figure:
    options = {"sequence": 2048, "tp": tp, "checkpointing": checkpointing}
    binds = partial(what_binds, MODELS[model], CLUSTERS[cluster], **options)
    name = f"{model} on {cluster}, tp {tp}{', checkpointing' * checkpointing}"
    return bound_map({name: binds}, [2**k for k in range(4, 15)], [2**k for k in range(3, 15)], sequence=2048)
