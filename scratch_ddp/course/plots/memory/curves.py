"""What a rank holds over time, under a limit: a panel per strategy."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scratch_ddp.course.plots.style import QUIET, SENT_COLOR, SUM_COLOR, draw_quiet_axes, rank_color

_MILLION = 1e6  # bytes: the unit of the axis


def memory_curves(
    curves: dict[str, Sequence[tuple[float, int]]],
    limit: int | None = None,
    ends: dict[str, Sequence[float]] | None = None,
) -> Figure:
    """A panel per name: the bytes held over time, as in `memory_use().over_time`, with the peak written beside.

    All panels have the same height; each has its own time axis. `limit` (bytes) is a line through all panels; what
    exceeds it is red. `ends`: by name, the seconds at which parts ended, such as building the model and each step.
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
        panel.set_ylim(0, top / _MILLION)
        draw_quiet_axes(panel)
    axes.flat[0].set_ylabel("MB held", fontsize=9)
    if limit:
        last = axes.flat[-1]
        at_right = last.get_yaxis_transform()
        last.text(1.0, limit / _MILLION, " the limit", transform=at_right, va="center", fontsize=8, color=SUM_COLOR)
    return figure


def _draw_curve(panel: Axes, curve: Sequence[tuple[float, int]], color: str, limit: int | None) -> None:
    seconds, held = [at for at, _ in curve], [nbytes / _MILLION for _, nbytes in curve]
    panel.fill_between(seconds, held, step="post", color=color, alpha=0.35, lw=0)
    panel.step(seconds, held, where="post", color=color, lw=0.9)
    if limit:
        beyond = [max(each, limit / _MILLION) for each in held]
        panel.fill_between(seconds, limit / _MILLION, beyond, step="post", color=SENT_COLOR, alpha=0.6, lw=0)
        panel.axhline(limit / _MILLION, color=SUM_COLOR, lw=0.9, ls="--")
    at, peak = max(curve, key=lambda moment: moment[1])
    late = at > (seconds[0] + seconds[-1]) / 2
    panel.annotate(
        f"{peak / _MILLION:.0f} MB", (at, peak / _MILLION), (0, 3), textcoords="offset points", fontsize=8,
        ha="right" if late else "left", color=SUM_COLOR,
    )  # fmt: skip


def _mark_parts(panel: Axes, ends: Sequence[float], top: float) -> None:
    """A thin line where each part ends."""
    for end in ends:
        panel.axvline(end, color=QUIET, lw=0.8, zorder=0)
