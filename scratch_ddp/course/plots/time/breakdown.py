"""Where a step's time went on each rank: the parts of its breakdown, one bar per rank."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from scratch_ddp.course.plots.style import GREY, SENT_COLOR
from scratch_ddp.course.plots.time.lanes import label_lanes, panels_with_lanes
from scratch_ddp.course.plots.time.timeline import COMPUTING_COLORS
from scratch_ddp.instruments.timeline import PARTS, Breakdown

_COLORS = {**COMPUTING_COLORS, "waiting": "#e3e3e3", "transfer": SENT_COLOR, "idle": "white"}
_HATCHES = {"waiting": "////"}  # nothing happens, but the rank can't go on


def breakdown_chart(panels: Mapping[str, Sequence[Breakdown]]) -> Figure:
    """A panel per title with a bar per rank, cut into parts in the order in which they took place.

    Waiting for another rank is hatched, idle time is white. All panels have the same axis: milliseconds from the start
    of their earliest rank.
    """
    figure, axes = panels_with_lanes([len(ranks) for ranks in panels.values()], inches=0.34, margin=0.6, gap=0.4)
    for panel, (title, ranks) in zip(axes, panels.items(), strict=True):
        zero = min(each.start for each in ranks)
        for row, each in enumerate(ranks):
            _draw_rank(panel, row, each, zero)
        label_lanes(panel, title, [each.rank for each in ranks])
    axes[-1].set_xlim(left=0)
    axes[-1].set_xlabel("milliseconds", fontsize=9)
    everyone = [each for ranks in panels.values() for each in ranks]
    names = [name for name in PARTS if any(each.seconds(name) > 0.005 * each.step for each in everyone)]
    patches = [
        Patch(facecolor=_COLORS[name], hatch=_HATCHES.get(name), edgecolor=GREY, lw=0.3, label=name) for name in names
    ]
    figure.legend(handles=patches, loc="outside upper right", ncols=len(patches), frameon=False, fontsize=8)
    return figure


def _draw_rank(panel: Axes, row: int, each: Breakdown, zero: float) -> None:
    for name, intervals in each.parts.items():
        milliseconds = [(1e3 * (start - zero), 1e3 * (end - start)) for start, end in intervals]
        hatch = _HATCHES.get(name)
        panel.broken_barh(milliseconds, (row - 0.36, 0.72), facecolors=_COLORS[name], hatch=hatch, edgecolor=GREY, lw=0)
    width = 1e3 * each.step
    panel.broken_barh([(1e3 * (each.start - zero), width)], (row - 0.36, 0.72), facecolors="none", ec=GREY, lw=0.4)
