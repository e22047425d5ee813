"""What charts of ranks over time share: a panel per title, with a lane for each rank."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scratch_ddp.course.plots.style import draw_quiet_axes


def panels_with_lanes(lanes: Sequence[int], inches: float, margin: float, gap: float) -> tuple[Figure, Sequence[Axes]]:
    """A panel for each number of lanes, one below the other, all with the same axis of time.

    `inches`: height of a lane; `margin`: what the figure's height has beyond lanes and titles; `gap`: what a panel has
    beyond its lanes, in lanes.
    """
    figure, axes = plt.subplots(
        len(lanes),
        1,
        figsize=(8.6, inches * sum(lanes) + 0.42 * len(lanes) + margin),
        height_ratios=[count + gap for count in lanes],
        squeeze=False,
        sharex=True,
        layout="constrained",
    )
    return figure, list(axes.flat)


def label_lanes(panel: Axes, title: str, ranks: Sequence[int], edge: float = 0.0) -> None:
    """Title a panel and name its lanes, the first on top. `edge` moves the panel's limits down, in lanes."""
    panel.set_title(title, fontsize=10, loc="left", pad=4)
    panel.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks], fontsize=9)
    panel.set_ylim(len(ranks) - 0.5 + edge, -0.5 - edge)
    draw_quiet_axes(panel)
