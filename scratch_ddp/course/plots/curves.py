"""Lines over the steps of a training run."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from scratch_ddp.plots.colors import QUIET, rank_color


def step_curves(
    panels: dict[str, dict[str, Sequence[float]]],
    what: str,
    log: bool = False,
    limits: tuple[float, float] | None = None,
) -> Figure:
    """A panel for each title, in it a line for each name: a number a step, from step 0 on. `what` names the numbers.

    Each line is thinner than the one before, so that lines which lie upon one another are all seen. `log` and
    `limits` (lowest, highest) concern every panel; a line that leaves the limits runs out of its panel.
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
        panel.tick_params(labelsize=8)
        panel.spines[:].set_color(QUIET)
        panel.legend(fontsize=8, frameon=False)
        if log:
            panel.set_yscale("log")
        if limits:
            panel.set_ylim(*limits)
    axes[0, 0].set_ylabel(what, fontsize=9)
    return figure
