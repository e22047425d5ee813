"""What every rank computed, and what it had on the wire, over time."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from scratch_ddp.course.plots.style import SENT_COLOR
from scratch_ddp.course.plots.time.lanes import label_lanes, panels_with_lanes
from scratch_ddp.instruments.intervals import Interval, without
from scratch_ddp.instruments.timeline import Timeline

COMPUTING_COLORS = {
    "forward": "#9ecae1",
    "backward": "#4e79a7",
    "optimizer": "#59a14f",
    "other": "#b9a38f",
    "data": "#edc948",
}
_HIDDEN = "#f2b5b5"  # communication during computing; exposed communication is red
_BAR = 0.42  # height of a bar, in rows of a rank


def timeline_chart(panels: Mapping[str, Sequence[Timeline]]) -> Figure:
    """A panel per title with two bars per rank: what it computed, and below it what was on its wire.

    Communication is pale while the rank computes, and red while it does not. A thin line separates two messages. All
    panels have the same axis: milliseconds from the start of their earliest rank.
    """
    lanes = [len(timelines) for timelines in panels.values()]
    figure, axes = panels_with_lanes(lanes, inches=0.42, margin=0.55, gap=0)
    for panel, (title, timelines) in zip(axes, panels.items(), strict=True):
        zero = min(_beginning(timeline) for timeline in timelines)
        for row, timeline in enumerate(timelines):
            _draw_rank(panel, row, timeline, zero)
        label_lanes(panel, title, [timeline.rank for timeline in timelines])
    axes[-1].set_xlim(left=0)
    axes[-1].set_xlabel("milliseconds", fontsize=9)
    _add_legend(figure, panels)
    return figure


def _draw_rank(panel: Axes, row: int, timeline: Timeline, zero: float) -> None:
    for span in timeline.compute:
        _draw_bars(panel, [span.interval], row - _BAR, zero, COMPUTING_COLORS[span.name])
    computing = [span.interval for span in timeline.compute]
    for span in timeline.communication:
        _draw_bars(panel, [span.interval], row, zero, _HIDDEN)
        _draw_bars(panel, without([span.interval], computing), row, zero, SENT_COLOR)
    for span in timeline.communication:
        panel.plot([1e3 * (span.start - zero)] * 2, [row, row + _BAR], color="white", lw=0.6, zorder=3)


def _draw_bars(panel: Axes, intervals: Sequence[Interval], top: float, zero: float, color: str) -> None:
    milliseconds = [(1e3 * (start - zero), 1e3 * (end - start)) for start, end in intervals]
    panel.broken_barh(milliseconds, (top, _BAR), facecolors=color, lw=0)


def _beginning(timeline: Timeline) -> float:
    return min([span.start for span in [*timeline.compute, *timeline.communication]], default=timeline.start)


def _add_legend(figure: Figure, panels: Mapping[str, Sequence[Timeline]]) -> None:
    timelines = [timeline for each in panels.values() for timeline in each]
    seen = {span.name for timeline in timelines for span in timeline.compute}
    patches = [Patch(color=color, label=name) for name, color in COMPUTING_COLORS.items() if name in seen]
    if any(timeline.communication for timeline in timelines):
        patches += [Patch(color=_HIDDEN, label="communication, hidden"), Patch(color=SENT_COLOR, label="exposed")]
    if patches:
        figure.legend(handles=patches, loc="outside upper right", ncols=len(patches), frameon=False, fontsize=8)
