"""A training that was interrupted: its losses beside those without interruption, and its steps over time."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from scratch_ddp.course.plots.style import GREY, QUIET, SENT_COLOR, draw_quiet_axes, rank_color


def resumed_losses(lines: Sequence[Mapping], plain: Sequence[float]) -> Figure:
    """The losses of `lines`, a step log with repeated steps, on those of the run without interruption."""
    figure, panel = plt.subplots(figsize=(7.2, 2.7), layout="constrained")
    panel.plot(range(1, len(plain) + 1), plain, lw=7, color=QUIET, label="without interruption", solid_capstyle="butt")
    kept = {line["step"]: line["loss"] for line in lines}
    panel.plot(list(kept), list(kept.values()), lw=1.6, color=rank_color(0), label="on two hosts, interrupted twice")
    panel.set_xlabel("step", fontsize=9)
    panel.set_ylabel("loss", fontsize=9)
    panel.legend(fontsize=8, frameon=False)
    draw_quiet_axes(panel)
    return figure


def steps_over_time(lines: Sequence[Mapping], killed: Mapping[str, float]) -> Figure:
    """Which step a run was at, over the seconds since its first: a colour per attempt, a line where it lost something.

    `killed`: what was killed, and when, as times of the log.
    """
    figure, panel = plt.subplots(figsize=(7.2, 2.7), layout="constrained")
    begin = lines[0]["time"]
    for number, attempt in enumerate(attempts(lines)):
        ranks = attempt[0]["ranks"]
        times = [line["time"] - begin for line in attempt]
        label = f"{ranks} rank{'s' * (ranks > 1)}, steps {attempt[0]['step']} to {attempt[-1]['step']}"
        panel.plot(times, [line["step"] for line in attempt], ".-", ms=5, lw=1.2, color=rank_color(number), label=label)
    for what, when in killed.items():
        panel.axvline(when - begin, color=SENT_COLOR, lw=1, ls="--")
        panel.text(when - begin, 0.3, f" {what} killed", fontsize=8, color=SENT_COLOR, va="bottom")
    panel.set_xlabel("seconds", fontsize=9)
    panel.set_ylabel("step", fontsize=9)
    panel.set_ylim(0)
    panel.set_xlim(-1)
    figure.legend(fontsize=8, frameon=False, loc="outside upper left", ncols=3, labelcolor=GREY)
    draw_quiet_axes(panel)
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
    figure, panel = plt.subplots(figsize=(6.2, 2.9), layout="constrained")
    panel.plot(list(lost), [100 * share for share in lost.values()], "o-", ms=4, lw=1.4, color=rank_color(0))
    panel.axvline(young, color=SENT_COLOR, lw=1, ls="--")
    panel.text(young, 1, f" Young: {young:.0f} s", fontsize=8, color=SENT_COLOR, va="bottom")
    panel.set_xscale("log")
    ticks = [seconds for seconds in lost if len(f"{seconds:g}".strip("0")) == 1 and f"{seconds:g}"[0] in "1245"]
    panel.set_xticks(ticks, [f"{seconds:g}" for seconds in ticks])
    panel.minorticks_off()
    panel.set_ylim(0)
    panel.set_xlabel("seconds between two saves", fontsize=9)
    panel.set_ylabel("% of the time lost", fontsize=9)
    draw_quiet_axes(panel)
    return figure
