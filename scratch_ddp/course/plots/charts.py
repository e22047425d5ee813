"""Lines and bars over axes: steps, seconds, sizes, bytes, tokens; forecast beside measured; and which bound binds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, fields
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter

from scratch_ddp.course.plots import style
from scratch_ddp.course.plots.style import GREY, QUIET, SENT_COLOR, SUM_COLOR, rank_color, write
from scratch_ddp.instruments.bandwidth import AlphaBeta, Results
from scratch_ddp.instruments.cost import BOUNDS, RankMemory
from scratch_ddp.instruments.sizes import format_size

Lines = Mapping[str, Sequence[float]]  # by name


def step_curves(
    panels: Mapping[str, Lines], what: str, log: bool = False, limits: tuple[float, float] | None = None
) -> Figure:
    """A panel per title, with a line per name: one number per step, from step 0 on. `what` names the numbers.

    Each line is thinner than the one before, so that equal lines are all visible. `log` and `limits` (lowest, highest)
    hold for every panel; lines beyond the limits are cut off.
    """
    figure, drawn = style.titled_panels(panels, min(10, 3.9 * len(panels) + 0.6), 2.9)
    for panel, lines in drawn:
        _draw_lines(panel, lines, thickest=4)
        panel.set(xlabel="step", yscale="log" if log else "linear", ylim=limits)
        style.add_legend(panel)
    figure.axes[0].set_ylabel(what)
    return figure


def losses_and_residuals(losses: Lines, residuals: Lines) -> Figure:
    """The `losses` of runs that should be equal, and below their `residuals`: a number per step and name, from step 0.

    Residuals are not negative; their axis is logarithmic down to 1e-17 and also shows 0. A name has the same colour in
    both panels.
    """
    figure, (above, below) = style.quiet_panels(7.6, 4.7, rows=2, sharex=True, height_ratios=[3, 2])
    _draw_lines(above, losses, thickest=8)
    numbers = {name: number for number, name in enumerate(dict.fromkeys([*losses, *residuals]))}
    for name, values in residuals.items():
        below.plot(values, ".", ms=6, color=rank_color(numbers[name]), label=name, clip_on=False)
    above.set_ylabel("loss")
    below.set(xlabel="step", ylabel="difference from\none process", ylim=(0, 1))
    below.set_yscale("symlog", linthresh=1e-17, linscale=0.5)
    below.set_yticks([0, 1e-16, 1e-12, 1e-8, 1e-4, 1], ["0", "1e-16", "1e-12", "1e-8", "1e-4", "1"])
    below.minorticks_off()
    below.grid(axis="y", color=QUIET, lw=0.5)
    for panel in (above, below):
        style.add_legend(panel, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _draw_lines(panel: Axes, lines: Lines, thickest: float) -> None:
    """Each thinner than the one before."""
    widths = np.linspace(1.4, thickest, len(lines))[::-1]
    for number, (name, values) in enumerate(lines.items()):
        panel.plot(values, lw=widths[number], color=rank_color(number), label=name, solid_capstyle="butt")


def disagreement_saw(panels: Mapping[str, Sequence[tuple[str, float]]]) -> Figure:
    """A panel per loop: the largest difference between the ranks' gradients over the micro-batches of an epoch.

    The events of a loop are, in order, ("backward", d) when a micro-batch's gradients have been accumulated, ("sync",
    d) after `sync_gradients`, and ("step", d) before an optimizer step, where d is the difference then. A step with the
    same gradients on all ranks is a dark dot, a step with different gradients a red cross. Solid lines: the gradients.
    Dotted lines: a step has used them, and they are cleared.
    """
    height = 1.25 * len(panels) + 0.85
    figure, drawn = style.titled_panels(panels, 7.6, height, down=True, sharex=True, sharey=True)
    marks = {}
    for panel, events in drawn:
        micro_batch, at = 0, (0, 0.0)
        for what, apart in events:
            micro_batch += what == "backward"
            here = (micro_batch, apart)
            if what == "step":
                name = "a step, each rank with its own" if apart else "a step, all ranks with the same gradient"
                marker, color = ("X", SENT_COLOR) if apart else ("o", SUM_COLOR)
                (marks[name],) = panel.plot(*here, marker, color=color, ms=7, zorder=4)
                panel.plot([micro_batch] * 2, [apart, 0], ":", color=SENT_COLOR, lw=1.2, zorder=2)
                here = (micro_batch, 0.0)
            else:
                panel.fill_between(*zip(at, here, strict=True), color=QUIET, alpha=0.35, lw=0, zorder=0)
                panel.plot(*zip(at, here, strict=True), color=SUM_COLOR, lw=1.6, zorder=3, solid_capstyle="round")
            at = here
        panel.axhline(0, color=QUIET, lw=0.8, zorder=1)
    most = max(sum(what == "backward" for what, _ in events) for events in panels.values())
    highest = max(apart for events in panels.values() for _, apart in events)
    panel.set(xlabel="micro-batch", xticks=range(1, most + 1), ylim=(-0.1 * highest, 1.15 * highest))
    figure.supylabel("difference between gradients" if len(panels) > 1 else "difference", fontsize=9)
    style.add_legend(figure, marks.values(), marks, loc="outside upper right", ncols=2)
    return figure


def memory_curves(
    curves: Mapping[str, Sequence[tuple[float, int]]], limit: int, ends: Mapping[str, Sequence[float]]
) -> Figure:
    """A panel per name: the bytes held over time, as in `memory_use().over_time`, with the peak written beside.

    `limit` (bytes) is a line through all panels; what exceeds it is red. `ends`: by name, the seconds at which parts
    ended, such as building the model and each step.
    """
    figure, panels = style.titled_panels(curves, 2.15 * len(curves) + 0.7, 2.9, sharey=True)
    room = limit / 1e6
    top = max(limit, *(nbytes for curve in curves.values() for _, nbytes in curve)) / 1e6
    for number, (name, (panel, curve)) in enumerate(zip(curves, panels, strict=True)):
        seconds, held = [at for at, _ in curve], [nbytes / 1e6 for _, nbytes in curve]
        panel.fill_between(seconds, held, step="post", color=rank_color(number), alpha=0.35, lw=0)
        panel.step(seconds, held, where="post", color=rank_color(number), lw=0.9)
        beyond = [max(each, room) for each in held]
        panel.fill_between(seconds, room, beyond, step="post", color=SENT_COLOR, alpha=0.6, lw=0)
        panel.axhline(room, color=SUM_COLOR, lw=0.9, ls="--")
        peak = max(held)
        at = seconds[held.index(peak)]
        side = "right" if at > (seconds[0] + seconds[-1]) / 2 else "left"
        write(panel, at, peak + 0.01 * top, f"{peak:.0f} MB", SUM_COLOR, 8, ha=side, va="bottom")
        panel.vlines(ends.get(name, ()), 0, 1.12 * top, color=QUIET, lw=0.8, zorder=0)
        panel.set(xlabel="seconds", ylim=(0, 1.12 * top))
    figure.axes[0].set_ylabel("MB held")
    write(panel, 1, room, " the limit", SUM_COLOR, 8, ha="left", transform=panel.get_yaxis_transform())
    return figure


def attempts(lines: Sequence[Mapping]) -> list[list[Mapping]]:
    """The lines of a step log, cut where a run went back to a checkpoint."""
    parts: list[list[Mapping]] = []
    for line in lines:
        if not parts or line["step"] <= parts[-1][-1]["step"]:
            parts.append([])
        parts[-1].append(line)
    return parts


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
        look = {"color": rank_color(number), "marker": "osD^vPX*"[number % 8], "ms": 5, "lw": 1.4}
        panel.errorbar([row.size for row in series], median, spread, capsize=2, label=name, **look)
        if fits and name in fits:
            panel.plot(between, fits[name].seconds(between), "--", color=rank_color(number), lw=1)
    for name, other in (others or {}).items():
        panel.plot(between, other.seconds(between), color=GREY, lw=0.9, zorder=1)
        end = {"ha": "left", "transform": panel.get_yaxis_transform()}
        write(panel, 1.02, other.seconds(sizes[-1]), name, size=8, **end)
    panel.set(yscale="log", ylabel="time per call")
    panel.yaxis.set_major_formatter(EngFormatter("s"))
    label_sizes(panel, sizes)
    dashes = panel.plot([], [], "--", lw=1, color=GREY, label="α + β·S") if fits else []
    style.add_legend(figure, handles=[*panel.containers, *dashes], loc="outside lower left", ncols=2)
    return figure


def label_sizes(panel: Axes, sizes: Sequence[int]) -> None:
    """Name at most eight sizes on a logarithmic axis."""
    shown = sizes[:: -(-len(sizes) // 8)]
    panel.set(xscale="log", xlabel="size of the tensor, S")
    panel.set_xticks(shown, [format_size(size).replace(" ", "\n") for size in shown])
    panel.set_xticks([], minor=True)
    panel.grid(color=QUIET, lw=0.4, alpha=0.6)


class Sweep(NamedTuple):
    """Seconds of a step."""

    buckets: Mapping[float, float]  # by bucket size in MB, in ascending order
    per_parameter: float  # with one message per gradient, as soon as it is ready
    flat: float  # with one message for all gradients, after backward
    compute: float  # without communication
    best: tuple[float, float]  # the best size, and its step


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
