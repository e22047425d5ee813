"""Who sent to whom, round by round."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scratch_ddp.course.plots.style import QUIET, SUM_COLOR, rank_color
from scratch_ddp.instruments.traffic import Message


def message_ladder(
    panels: dict[str, Sequence[Message]], n: int, source: int | None = None, parts: dict[str, int] | None = None
) -> Figure:
    """A panel per title: a line for each of the n ranks, with time from left to right and an arrow per message.

    The messages are those of `Totals.log`, which have the round in which each ended. With `source`, a rank's line is
    thick from the round on in which it has the source's values. Arrows have the colour of the sending rank. `parts`
    names groups of rounds, in order: {name: number of rounds}; a line separates two parts.
    """
    depths = [max((message.round for message in log), default=1) for log in panels.values()]
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(min(10, 1.0 * sum(depths) + 0.9 * len(panels)), 0.38 * n + (0.95 if parts else 0.75)),
        width_ratios=[depth + 0.5 for depth in depths],
        squeeze=False,
    )
    for panel, (title, log), depth in zip(axes.flat, panels.items(), depths, strict=True):
        _draw_ladder(panel, log, n, depth, source)
        _draw_parts(panel, parts or {})
        panel.set_title(title, fontsize=10, loc="left")
    figure.tight_layout(w_pad=2.5)
    return figure


def _draw_ladder(panel: Axes, log: Sequence[Message], n: int, depth: int, source: int | None) -> None:
    for rank in range(n):
        panel.plot([0, depth + 0.15], [rank, rank], color=QUIET, lw=1, zorder=1)
    for rank, since in _informed(log, source).items():
        panel.plot([since, depth + 0.15], [rank, rank], color=SUM_COLOR, lw=4, zorder=2, solid_capstyle="butt")
    for message in log:
        arrow = {"arrowstyle": "-|>", "color": rank_color(message.sender), "lw": 2, "shrinkA": 0, "shrinkB": 2}
        start, end = (message.round - 0.92, message.sender), (message.round, message.receiver)
        panel.annotate("", end, start, arrowprops=arrow, zorder=3)
    panel.set_xlim(-0.05, depth + 0.2)
    panel.set_ylim(n - 0.6, -0.4)
    panel.set_yticks(range(n), [f"rank {rank}" for rank in range(n)], fontsize=9)
    panel.set_xticks([at + 0.5 for at in range(depth)], [f"round {at + 1}" for at in range(depth)], fontsize=9)
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    for at in range(1, depth):
        panel.axvline(at + 0.04, color=QUIET, lw=0.7, ls=":", zorder=0)


def _draw_parts(panel: Axes, parts: dict[str, int]) -> None:
    begins, middles = 0, []
    for rounds in parts.values():
        if begins:
            panel.axvline(begins + 0.04, color=SUM_COLOR, lw=1.5)
        middles.append(begins + rounds / 2)
        begins += rounds
    panel.set_xticks(middles, list(parts), minor=True, fontsize=10, weight="bold")
    panel.tick_params(which="minor", length=0, pad=20)


def _informed(log: Sequence[Message], source: int | None) -> dict[int, int]:
    """For each rank that the source's values reach: the round from which on it has them."""
    since = {} if source is None else {source: 0}
    for message in sorted(log):
        if since.get(message.sender, message.round) < message.round:
            since.setdefault(message.receiver, message.round)
    return since
