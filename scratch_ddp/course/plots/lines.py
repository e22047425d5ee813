"""Lines over a training's steps or seconds: losses, distances, memory, interruptions."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scratch_ddp.course.plots import style
from scratch_ddp.course.plots.style import GREY, QUIET, SENT_COLOR, SUM_COLOR, rank_color, write

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

    Each line of losses is thinner than the one before, so that equal ones are all visible. Residuals are not negative;
    their axis is logarithmic down to 1e-17 and also shows 0. A name has the same colour in both panels.
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

    All panels have the same height; each has its own time axis. `limit` (bytes) is a line through all panels; what
    exceeds it is red. `ends`: by name, the seconds at which parts ended, such as building the model and each step.
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


def steps_over_time(lines: Sequence[Mapping], killed: Mapping[str, float]) -> Figure:
    """Which step a run was at, over the seconds since its first: a colour per attempt, a line where it lost something.

    `killed`: what was killed, and when, as times of the log.
    """
    figure, (panel,) = style.quiet_panels(7.2, 2.7)
    begin = lines[0]["time"]
    for number, attempt in enumerate(attempts(lines)):
        times, steps = [line["time"] - begin for line in attempt], [line["step"] for line in attempt]
        ranks = attempt[0]["ranks"]
        label = f"{ranks} rank{'s' * (ranks > 1)}, steps {steps[0]} to {steps[-1]}"
        panel.plot(times, steps, ".-", ms=5, lw=1.2, color=rank_color(number), label=label)
    for what, when in killed.items():
        panel.axvline(when - begin, color=SENT_COLOR, lw=1, ls="--")
        write(panel, when - begin, 0.3, f" {what} killed", SENT_COLOR, 8, ha="left", va="bottom")
    panel.set(xlabel="seconds", ylabel="step", xlim=(-1, None), ylim=(0, None))
    style.add_legend(figure, loc="outside upper left", ncols=3, labelcolor=GREY)
    return figure


def attempts(lines: Sequence[Mapping]) -> list[list[Mapping]]:
    """The lines of a step log, cut where a run went back to a checkpoint."""
    parts: list[list[Mapping]] = []
    for line in lines:
        if not parts or line["step"] <= parts[-1][-1]["step"]:
            parts.append([])
        parts[-1].append(line)
    return parts


def saving_curve(lost: Mapping[float, float], young: float) -> Figure:
    """The share of the time that is lost, for each number of seconds between two saves; a line at Young's interval."""
    figure, (panel,) = style.quiet_panels(6.2, 2.9)
    panel.plot(list(lost), [100 * share for share in lost.values()], "o-", ms=4, lw=1.4, color=rank_color(0))
    panel.axvline(young, color=SENT_COLOR, lw=1, ls="--")
    write(panel, young, 1, f" Young: {young:.0f} s", SENT_COLOR, 8, ha="left", va="bottom")
    panel.set(xscale="log", xlabel="seconds between two saves", ylabel="% of the time lost", ylim=(0, None))
    ticks = [seconds for seconds in lost if f"{seconds:g}".strip("0") in {"1", "2", "4", "5"}]
    panel.set_xticks(ticks, [f"{seconds:g}" for seconds in ticks])
    panel.minorticks_off()
    return figure
