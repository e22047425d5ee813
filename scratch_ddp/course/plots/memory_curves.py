"""What ranks hold over time, under a limit: a panel for each way to train."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scratch_ddp.course.plots.colors import QUIET, SENT_COLOR, SUM_COLOR, rank_color

MB = 1e6


def memory_curves(
    curves: dict[str, Sequence[tuple[float, int]]],
    limit: int | None = None,
    ends: dict[str, Sequence[float]] | None = None,
) -> Figure:
    """A panel for each name: the bytes held over time, as `memory_use().over_time` has them, with the peak written in.

    All panels have the same height; each has its own time. `limit` (bytes) is a line through all of them, red where a
    curve goes beyond it. `ends`: by name, the moments at which a part ended (the seconds of the curve): "built", then
    a step each.
    """
    figure, axes = plt.subplots(
        1, len(curves), figsize=(2.15 * len(curves) + 0.7, 2.9), squeeze=False, sharey=True, layout="constrained"
    )
    highest = max(held for curve in curves.values() for _, held in curve)
    top = 1.12 * max(highest, limit or 0)
    for number, (panel, (name, curve)) in enumerate(zip(axes.flat, curves.items(), strict=True)):
        _draw_curve(panel, curve, rank_color(number), limit)
        _mark_parts(panel, (ends or {}).get(name, ()), top)
        panel.set_title(name, fontsize=10, loc="left", pad=4)
        panel.set_xlabel("seconds", fontsize=8)
        panel.set_ylim(0, top / MB)
        panel.tick_params(labelsize=8, length=2, color=QUIET)
        panel.spines[:].set_color(QUIET)
        panel.spines[["top", "right"]].set_visible(False)
    axes.flat[0].set_ylabel("MB held", fontsize=9)
    if limit:
        axes.flat[-1].text(1.0, limit / MB, " the limit", transform=axes.flat[-1].get_yaxis_transform(), va="center",
                           fontsize=8, color=SUM_COLOR)  # fmt: skip
    return figure


def _draw_curve(panel: Axes, curve: Sequence[tuple[float, int]], color: str, limit: int | None) -> None:
    seconds, held = [at for at, _ in curve], [nbytes / MB for _, nbytes in curve]
    panel.fill_between(seconds, held, step="post", color=color, alpha=0.35, lw=0)
    panel.step(seconds, held, where="post", color=color, lw=0.9)
    if limit:
        beyond = [max(each, limit / MB) for each in held]
        panel.fill_between(seconds, limit / MB, beyond, step="post", color=SENT_COLOR, alpha=0.6, lw=0)
        panel.axhline(limit / MB, color=SUM_COLOR, lw=0.9, ls="--")
    at, peak = max(curve, key=lambda moment: moment[1])
    late = at > (seconds[0] + seconds[-1]) / 2
    panel.annotate(
        f"{peak / MB:.0f} MB", (at, peak / MB), (0, 3), textcoords="offset points", fontsize=8,
        ha="right" if late else "left", color=SUM_COLOR,
    )  # fmt: skip


def _mark_parts(panel: Axes, ends: Sequence[float], top: float) -> None:
    """A thin line where each part ends."""
    for end in ends:
        panel.axvline(end, color=QUIET, lw=0.8, zorder=0)
