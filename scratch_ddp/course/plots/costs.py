"""Seconds and bytes, forecast and measured: of collectives, buckets and layouts, and which bound binds."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, NullLocator

from scratch_ddp.course.plots import style
from scratch_ddp.course.plots.style import GREY, QUIET, SENT_COLOR, SUM_COLOR, rank_color, write
from scratch_ddp.instruments.bandwidth import AlphaBeta, Results
from scratch_ddp.instruments.cost import BOUNDS, CLUSTERS, MODELS, RankMemory, what_binds
from scratch_ddp.instruments.sizes import format_size


def time_chart(
    results: Results, fits: Mapping[str, AlphaBeta] | None = None, others: Mapping[str, AlphaBeta] | None = None
) -> Figure:
    """A line per number of ranks: median time by size, on logarithmic axes.

    The bars show the quartiles. `fits`, by the names of `Results.series`, are dashed lines. `others`, by any names, are
    thin grey lines to compare with, with their names at the right.
    """
    figure, (panel,) = style.quiet_panels(6.4, 4.2)
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
        end = {"ha": "left", "transform": panel.get_yaxis_transform()}
        write(panel, 1.02, other.seconds(sizes[-1]), name, size=8, **end)
    panel.set(yscale="log", ylabel="time per call")
    panel.yaxis.set_major_formatter(EngFormatter("s"))
    _label_sizes(panel, sizes)
    dashes = panel.plot([], [], "--", lw=1, color=GREY, label="α + β·S") if fits else []
    style.add_legend(figure, handles=[*panel.containers, *dashes], loc="outside lower left", ncols=2)
    return figure


def bandwidth_chart(results: Results) -> Figure:
    """A panel per kind of bandwidth (algbw, busbw, as published) with the lines of `time_chart`, in GB/s.

    All panels have the same scale.
    """
    kinds = {"algbw: S/t": "algbw", "busbw: 2(n−1)/n · S/t": "busbw", "as published: 2 · S/t": "published"}
    figure, panels = style.titled_panels(kinds, 3.1 * len(kinds) + 0.6, 3.9, sharey=True)
    for panel, kind in panels:
        for number, (name, series) in enumerate(results.series().items()):
            rates = [getattr(row, kind) / 1e9 for row in series]
            panel.plot([row.size for row in series], rates, label=name, **_line_style(number))
        _label_sizes(panel, sorted({row.size for row in results}))
    figure.axes[0].set(ylabel="GB/s (10⁹ bytes per second)", ylim=(0, None))
    style.add_legend(figure, handles=figure.axes[0].lines, loc="outside lower left", ncols=len(kinds))
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


def bucket_sweep(forecasts: Mapping[str, Sweep], measured: Mapping[str, Mapping[float, float]]) -> Figure:
    """A line per forecast with its best size marked; measured steps (seconds by MB) of the same names are dots.

    Beside the sizes stand the alternatives to buckets: one message per gradient at the left, one for all at the right.
    """
    figure, (panel,) = style.quiet_panels(7.6, 4.4)
    sizes = sorted({size for sweep in forecasts.values() for size in sweep.buckets})
    ends = sizes[0] / 2.1, sizes[-1] * 2.1
    for number, (name, sweep) in enumerate(forecasts.items()):
        color, dots = rank_color(number), measured[name]
        panel.plot(list(sweep.buckets), list(sweep.buckets.values()), color=color, lw=1.8, label=f"forecast: {name}")
        panel.plot(*sweep.best, "*", ms=15, color=color, mec="white", mew=0.8, zorder=5)
        panel.plot(list(dots), list(dots.values()), "o", ms=8, color=color, mec="white", mew=1.2, zorder=4)
        for end, seconds in zip(ends, (sweep.per_parameter, sweep.flat), strict=True):
            panel.plot([end / 1.25, end * 1.25], [seconds, seconds], color=color, lw=3.2, solid_capstyle="butt")
        panel.axhline(sweep.compute, color=GREY, lw=0.9, ls=(0, (1, 2)))
    panel.plot([], [], "*", ms=11, color=GREY, mec="white", label="best size")
    panel.plot([], [], "o", ms=8, color=GREY, mec="white", label="measured")
    lowest = min(sweep.compute for sweep in forecasts.values())
    write(panel, sizes[0], 1.01 * lowest, "compute alone", size=8, ha="left", va="bottom")
    for place in (sizes[0] / 2.1**0.5, sizes[-1] * 2.1**0.5):
        panel.axvline(place, color=QUIET, lw=0.8)
    panel.set(xscale="log", xlabel="size of a bucket, MB", ylabel="step, seconds")
    panel.set(xlim=(ends[0] / 1.5, ends[1] * 1.5), ylim=(0.94 * lowest, None))
    powers = {10**k: f"{10**k:g}" for k in range(-3, 7) if sizes[0] <= 10**k <= sizes[-1]}
    ticks = {ends[0]: "one per\ngradient", **powers, ends[1]: "one\nfor all"}
    panel.set_xticks(list(ticks), list(ticks.values()))
    panel.minorticks_off()
    panel.grid(axis="y", color=QUIET, lw=0.4, alpha=0.6)
    style.add_legend(panel, loc="upper center", ncols=2)
    return figure


def forecast_curve(
    tokens: Sequence[int], forecast: Sequence[float], measured: Mapping[int, float], knee: float, compute: float
) -> Figure:
    """Seconds of a step for each token a device has: a line, and dots where it was measured.

    `knee`: the tokens from which on the step is compute-bound; `compute`: seconds of computing for a token.
    """
    figure, (panel,) = style.quiet_panels(6.4, 3.2)
    panel.plot(tokens, [1e3 * each / t for t, each in zip(tokens, forecast, strict=True)], color=SUM_COLOR, lw=1.4)
    places = [1e3 * seconds / t for t, seconds in measured.items()]
    panel.plot(list(measured), places, "o", color=rank_color(0), label="measured")
    panel.axhline(1e3 * compute, color=GREY, lw=1, ls="--", label="computing alone")
    panel.axvline(knee, color=SENT_COLOR, lw=1, label="compute-bound from here on")
    panel.set(xscale="log", xlabel="tokens of a device", ylabel="ms of a step for each token", ylim=(0, None))
    panel.set_xticks(list(measured), [str(each) for each in measured])
    panel.minorticks_off()
    style.add_legend(panel)
    return figure


def forecast_bars(forecast: Mapping[str, float], measured: Mapping[str, float]) -> Figure:
    """Two bars for each layout, the quickest first: forecast milliseconds and measured ones."""
    figure, (panel,) = style.quiet_panels(6.4, 3.8)
    names = sorted(measured, key=forecast.__getitem__)
    for number, (label, seconds) in enumerate({"forecast": forecast, "measured": measured}.items()):
        places = np.arange(len(names)) + 0.4 * number - 0.2
        values = [1e3 * seconds[name] for name in names]
        panel.barh(places, values, 0.36, color=(GREY, rank_color(0))[number], label=label)
        for place, value in zip(places, values, strict=True):
            write(panel, value, place, f" {value:.0f}", size=8, ha="left")
    panel.set_yticks(range(len(names)), names)
    panel.set(xlabel="ms of a step", xlim=(0, 1.1e3 * max(*forecast.values(), *measured.values())))
    panel.invert_yaxis()
    style.add_legend(figure, loc="outside lower center", ncols=2)
    return figure


def ways_on_links(
    measured: Mapping[str, Mapping[str, float]], forecast: Mapping[str, Mapping[str, float]], alone: float
) -> Figure:
    """A group for each link, in it a column for each way: `alone` / measured. A black line across it is the forecast.

    `measured` and `forecast`: seconds of a step by link and way; `alone`: on one GPU, which is the dashed line at 1.
    The one at 2, for two GPUs, is what can be hoped for.
    """
    figure, (panel,) = style.quiet_panels(8.2, 3.8)
    ways = list(next(iter(measured.values())))
    width = 0.8 / len(ways)
    for number, way in enumerate(ways):
        places = np.arange(len(measured)) + (number + 0.5) * width - 0.4
        speeds = np.array([alone / steps[way] for steps in measured.values()])
        panel.bar(places, speeds, 0.9 * width, color=rank_color(number), label=way)
        for place, speed in zip(places, speeds, strict=True):
            above, ink = (-0.13, "white") if speed > 0.5 else (0.08, "black")  # inside where there is room for it
            write(panel, place, speed + above, f"{speed:.2f}", ink, 8)
        expected = [alone / steps[way] for steps in forecast.values()]
        panel.hlines(expected, places - 0.45 * width, places + 0.45 * width, color="black", lw=1.4)
    panel.plot([], [], color="black", lw=1.4, label="forecast")
    for speed in (1, 2):
        panel.axhline(speed, color=GREY, lw=1, ls="--", zorder=0)
    panel.set_xticks(range(len(measured)), list(measured))
    panel.set(ylabel="times as fast as one GPU", ylim=(0, 2.5))
    style.add_legend(panel, loc="upper center", ncols=len(ways) + 1)
    return figure


def memory_bars(memories: Mapping[str, RankMemory], room: float) -> Figure:
    """A bar per name, in 10⁹ bytes, with the parts of `RankMemory` side by side; a dashed line at `room` bytes.

    The total stands behind each bar, red if it is more than there is room for. The axis ends at three times the room:
    a longer bar is cut off there.
    """
    figure, (panel,) = style.quiet_panels(8.2, 0.42 * len(memories) + 1.3)
    parts, room = np.array([astuple(each) for each in memories.values()]).T / 1e9, room / 1e9
    totals = parts.sum(0)
    end = min(3 * room, 1.15 * max(room, *totals))
    for number, (field, widths) in enumerate(zip(fields(RankMemory), parts, strict=True)):
        if widths.any():
            starts = parts[:number].sum(0)
            panel.barh(list(memories), widths, 0.68, starts, color=rank_color(number), label=field.name)
    for place, total in enumerate(totals):
        color = SENT_COLOR if total > room else SUM_COLOR
        write(panel, min(total, end), place, f" {total:,.3g} GB", color, 8, ha="left")
    panel.axvline(room, color=SUM_COLOR, lw=1, ls="--")
    write(panel, room, -0.62, " room", SUM_COLOR, 8, ha="left")
    panel.set(xlabel="GB of a rank", xlim=(0, end), ylim=(len(memories) - 0.45, -0.85))
    style.add_legend(figure, ncols=7, loc="outside lower center")
    return figure


def bound_map(
    panels: Mapping[str, Callable[[int, int], str]], devices: Sequence[int], batches: Sequence[int], sequence: int
) -> Figure:
    """A map for each name: its function gets (devices, sequences in a step) and returns one of BOUNDS.

    The axes are powers of two; the batch is shown in tokens, `sequence` to a sequence.
    """
    figure, drawn = style.titled_panels(panels, 3.4 * len(panels) + 0.9, 3.9, sharey=True)
    colors = dict(zip(BOUNDS, ("#8cc08a", "#f2b27a", "#b89acb", "#e39a9d", "#e4e4e4"), strict=True))
    for panel, binds in drawn:
        grid = [[to_rgb(colors[binds(n, batch)]) for n in devices] for batch in batches]
        panel.imshow(grid, origin="lower", aspect="auto")
        panel.set_xticks(range(0, len(devices), 2), [f"{n:,}" for n in devices[::2]])
        panel.set_xlabel("devices")
    tokens = [batch * sequence for batch in batches[::2]]
    names = [f"{n / 2**20:g} Mi" if n >= 2**20 else f"{n / 2**10:g} Ki" for n in tokens]
    figure.axes[0].set_yticks(range(0, len(batches), 2), names)
    figure.axes[0].set_ylabel("tokens in a step")
    handles = [Patch(color=color, label=name) for name, color in colors.items()]
    style.add_legend(figure, handles=handles, loc="outside lower center", ncols=len(handles))
    return figure


def bound_sliders() -> Figure | None:
    """Show the map with sliders for the model, the cluster, tp and checkpointing. Return a Figure where it can't be.

    JupyterLab names the notebook in the kernel's environment; a run without a browser, as for saving outputs, does not.
    """
    if "JPY_SESSION_NAME" not in os.environ or not find_spec("ipywidgets"):
        return _one_map()
    import ipywidgets

    tp = ipywidgets.SelectionSlider(options=[1, 2, 4, 8], value=8)
    ipywidgets.interact(_one_map, model=list(MODELS), cluster=list(CLUSTERS), tp=tp, checkpointing=True)
    return None


def _one_map(model: str = "XXL", cluster: str = "H100", tp: int = 8, checkpointing: bool = True) -> Figure:
    options = {"sequence": 2048, "tp": tp, "checkpointing": checkpointing}
    binds = partial(what_binds, MODELS[model], CLUSTERS[cluster], **options)
    name = f"{model} on {cluster}, tp {tp}{', checkpointing' * checkpointing}"
    return bound_map({name: binds}, [2**k for k in range(4, 15)], [2**k for k in range(3, 15)], sequence=2048)
