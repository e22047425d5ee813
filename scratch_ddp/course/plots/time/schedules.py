"""Pipeline schedules: what every rank does over time, as simulated or as it ran."""

import colorsys
from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from scratch_ddp.course.plots.time.lanes import label_lanes, panels_with_lanes
from scratch_ddp.pipeline.simulate import Spans, bubble

_COLORS = {"F": "#9ecae1", "B": "#4e79a7", "I": "#76b7b2", "W": "#f2b263"}
_NAMES = {"F": "forward", "B": "backward", "I": "backward: input", "W": "backward: weights"}
_BAR = 0.84  # height of a bar, in rows of a rank
_NARROW = 0.012  # share of the axis from which on a bar has its number


def schedule_chart(panels: Mapping[str, Spans], unit: float = 1.0, axis: str = "") -> Figure:
    """A panel per title, with a row for each rank: its actions over time, with the number of the micro-batch.

    Of several stages on a rank, later ones are darker. White is the bubble; its share stands in the title. Each panel
    begins with its first action; all have the same axis, in units of `unit` seconds, which `axis` names.
    """
    figure, axes = panels_with_lanes([len(spans) for spans in panels.values()], inches=0.27, margin=0.5, gap=0.3)
    zeros = [min(start for row in spans for _, start, _ in row) for spans in panels.values()]
    ends = [max(end for row in spans for *_, end in row) for spans in panels.values()]
    longest = max(end - zero for end, zero in zip(ends, zeros, strict=True)) / unit
    for panel, (title, spans), zero in zip(axes, panels.items(), zeros, strict=True):
        _draw(panel, spans, zero, unit, longest)
        label_lanes(panel, f"{title}: bubble {bubble(spans):.1%}", range(len(spans)), edge=0.05)
    axes[-1].set_xlim(0, longest)
    axes[-1].set_xlabel(axis, fontsize=9)
    kinds = [
        kind for kind in _COLORS if any(a.kind == kind for spans in panels.values() for row in spans for a, *_ in row)
    ]
    patches = [Patch(color=_COLORS[kind], label=_NAMES[kind]) for kind in kinds]
    figure.legend(handles=patches, loc="outside upper right", ncols=len(patches), frameon=False, fontsize=8)
    return figure


def _draw(panel: Axes, spans: Spans, zero: float, unit: float, longest: float) -> None:
    for rank, row in enumerate(spans):
        laps = sorted({action.stage for action, *_ in row})
        for action, start, end in row:
            left, width = (start - zero) / unit, (end - start) / unit
            color = _shade(_COLORS[action.kind], laps.index(action.stage))
            bar = Rectangle((left, rank - _BAR / 2), width, _BAR, facecolor=color, edgecolor="white", lw=0.7)
            panel.add_patch(bar)
            if width > _NARROW * longest:
                style = {"ha": "center", "va": "center_baseline", "fontsize": 7.5, "clip_on": True}
                panel.text(left + width / 2, rank, str(action.micro), color=_ink(color), **style)


def _shade(color: str, lap: int) -> tuple[float, float, float]:
    hue, lightness, saturation = colorsys.rgb_to_hls(*to_rgb(color))
    return colorsys.hls_to_rgb(hue, lightness * 0.72**lap, saturation)


def _ink(color: tuple[float, float, float]) -> str:
    red, green, blue = color
    return "white" if 0.3 * red + 0.6 * green + 0.1 * blue < 0.55 else "#222222"
