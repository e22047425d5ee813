"""What a rank holds, by purpose: a bar for each layout, against what a device has."""

from collections.abc import Mapping
from dataclasses import fields

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from scratch_ddp.course.plots.style import SENT_COLOR, SUM_COLOR, draw_quiet_axes, rank_color
from scratch_ddp.instruments.cost import RankMemory

_BILLION = 1e9


def memory_bars(memories: Mapping[str, RankMemory], room: float) -> Figure:
    """A bar per name, in 10⁹ bytes, with the parts of `RankMemory` side by side; a dashed line at `room` bytes.

    The total stands behind each bar, red if it is more than there is room for. The axis ends at three times the room:
    a longer bar is cut off there.
    """
    figure, panel = plt.subplots(figsize=(8.2, 0.42 * len(memories) + 1.3), layout="constrained")
    end = min(3 * room, 1.15 * max(room, *(each.total for each in memories.values()))) / _BILLION
    names = [field.name for field in fields(RankMemory)]
    starts = [0.0] * len(memories)
    for number, part in enumerate(names):
        widths = [getattr(each, part) / _BILLION for each in memories.values()]
        if any(widths):
            panel.barh(range(len(memories)), widths, left=starts, height=0.68, color=rank_color(number), label=part)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for place, each in enumerate(memories.values()):
        over = each.total > room
        text = f" {each.total / _BILLION:,.3g} GB"
        at = min(each.total / _BILLION, end)
        panel.text(at, place, text, va="center", fontsize=8, color=SENT_COLOR if over else SUM_COLOR)
    panel.axvline(room / _BILLION, color=SUM_COLOR, lw=1, ls="--")
    panel.text(room / _BILLION, -0.62, " room", fontsize=8, color=SUM_COLOR, va="center")
    panel.set_yticks(range(len(memories)), list(memories), fontsize=8)
    panel.set_ylim(len(memories) - 0.45, -0.85)
    panel.set_xlim(0, end)
    panel.set_xlabel("GB of a rank", fontsize=9)
    figure.legend(fontsize=8, frameon=False, ncols=len(names), loc="outside lower center")
    draw_quiet_axes(panel)
    return figure
