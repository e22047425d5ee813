"""Lines over the steps of training runs; also their losses, and how far these are from those of one process."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scratch_ddp.course.plots.style import QUIET, draw_quiet_frame, rank_color

_EXACT = 1e-17  # the logarithmic axis ends here, so that 0 can be shown below
_DECADES = range(-16, 1, 4)


def step_curves(
    panels: dict[str, dict[str, Sequence[float]]],
    what: str,
    log: bool = False,
    limits: tuple[float, float] | None = None,
) -> Figure:
    """A panel per title, with a line per name: one number per step, from step 0 on. `what` names the numbers.

    Each line is thinner than the one before, so that equal lines are all visible. `log` and `limits` (lowest, highest)
    hold for every panel; lines beyond the limits are cut off.
    """
    figure, axes = plt.subplots(
        1, len(panels), figsize=(min(10, 3.9 * len(panels) + 0.6), 2.9), squeeze=False, layout="constrained"
    )
    for panel, (title, lines) in zip(axes.flat, panels.items(), strict=True):
        for number, (name, values) in enumerate(lines.items()):
            width = 1.4 + 2.6 * (len(lines) - 1 - number) / max(len(lines) - 1, 1)
            panel.plot(values, lw=width, color=rank_color(number), label=name, solid_capstyle="butt")
        panel.set_title(title, fontsize=10, loc="left")
        panel.set_xlabel("step", fontsize=9)
        draw_quiet_frame(panel)
        panel.legend(fontsize=8, frameon=False)
        if log:
            panel.set_yscale("log")
        if limits:
            panel.set_ylim(*limits)
    axes[0, 0].set_ylabel(what, fontsize=9)
    return figure


def losses_and_residuals(losses: dict[str, Sequence[float]], residuals: dict[str, Sequence[float]]) -> Figure:
    """The `losses` of runs that should be equal, and below their `residuals`: a number per step and name, from step 0.

    Each line of losses is thinner than the one before, so that equal ones are all visible. Residuals are not negative;
    their axis is logarithmic down to 1e-17 and also shows 0. A name has the same colour in both panels.
    """
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(7.6, 4.7), sharex=True, height_ratios=[3, 2], layout="constrained"
    )
    colors = {name: rank_color(number) for number, name in enumerate(dict.fromkeys([*losses, *residuals]))}
    for number, (name, values) in enumerate(losses.items()):
        width = 1.3 + 6.7 * (len(losses) - 1 - number) / max(len(losses) - 1, 1)
        above.plot(values, lw=width, color=colors[name], label=name, solid_capstyle="butt")
    for name, values in residuals.items():
        below.plot(values, ".", ms=6, color=colors[name], label=name, clip_on=False)
    above.set_ylabel("loss", fontsize=9)
    below.set_ylabel("difference from\none process", fontsize=9)
    below.set_xlabel("step", fontsize=9)
    _use_decades(below)
    for panel in (above, below):
        draw_quiet_frame(panel)
        panel.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _use_decades(panel: Axes) -> None:
    panel.set_yscale("symlog", linthresh=_EXACT, linscale=0.5)
    panel.set_ylim(0, 1)
    panel.set_yticks([0, *(10.0**power for power in _DECADES)], ["0", *(f"1e{power}" for power in _DECADES[:-1]), "1"])
    panel.minorticks_off()
    panel.grid(axis="y", color=QUIET, lw=0.5)
