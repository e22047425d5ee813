"""What ranks did over time, in lanes: timelines, where a step's time went, and pipeline schedules."""

import colorsys
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from scratch_ddp.course.plots import style
from scratch_ddp.course.plots.style import GREY, SENT_COLOR, draw_box, write
from scratch_ddp.instruments.timeline import PARTS, Breakdown, Timeline
from scratch_ddp.instruments.timeline.spans import Interval, without
from scratch_ddp.pipeline.simulate import Spans, bubble

_MESSAGES = ("communication, hidden", "exposed")
_ACTIONS = {"F": "forward", "B": "backward", "I": "backward: input", "W": "backward: weights"}
_BLUES, _OTHERS = ("#9ecae1", "#4e79a7"), ("#59a14f", "#b9a38f", "#edc948", "#e3e3e3", SENT_COLOR, "white")
_COLORS = dict(zip((*PARTS, *_MESSAGES), (*_BLUES, *_OTHERS, "#f2b5b5", SENT_COLOR), strict=True))
_COLORS |= {"backward: input": "#76b7b2", "backward: weights": "#f2b263"}
_HATCHES = {"waiting": "////"}  # nothing happens, but the rank can't go on


def timeline_chart(panels: Mapping[str, Sequence[Timeline]]) -> Figure:
    """A panel per title with two bars per rank: what it computed, and below it what was on its wire.

    Communication is pale while the rank computes, and red while it does not. A thin line separates two messages. Time
    is in milliseconds from the start of the earliest rank.
    """
    figure, drawn = style.panels_with_lanes(panels, inches=0.42, axis="milliseconds")
    names = set()
    for panel, ranks in drawn:
        zero = min(span.start for each in ranks for span in [*each.compute, *each.communication])
        for row, each in enumerate(ranks):
            for span in each.compute:
                _draw_bars(panel, [span.interval], zero, (row - 0.42, 0.42), span.name)
            messages = [span.interval for span in each.communication]
            _draw_bars(panel, messages, zero, (row, 0.42), "communication, hidden")
            exposed = without(messages, [span.interval for span in each.compute])
            _draw_bars(panel, exposed, zero, (row, 0.42), "exposed")
            panel.vlines([1e3 * (start - zero) for start, _ in messages], row, row + 0.42, color="white", lw=0.6)
            names |= {*(span.name for span in each.compute), *(_MESSAGES if messages else ())}
    return _with_legend(figure, names)


def breakdown_chart(panels: Mapping[str, Sequence[Breakdown]]) -> Figure:
    """A panel per title with a bar per rank, cut into parts in the order in which they took place.

    Waiting for another rank is hatched, idle time is white. Time as in `timeline_chart`.
    """
    figure, drawn = style.panels_with_lanes(panels, inches=0.34, axis="milliseconds")
    names = set()
    for panel, ranks in drawn:
        zero = min(each.start for each in ranks)
        for row, each in enumerate(ranks):
            lane = (row - 0.36, 0.72)
            for name, intervals in each.parts.items():
                _draw_bars(panel, intervals, zero, lane, name)
            panel.broken_barh([(1e3 * (each.start - zero), 1e3 * each.step)], lane, facecolor="none", ec=GREY, lw=0.4)
            names |= {name for name in PARTS if each.seconds(name) > 0.005 * each.step}
    return _with_legend(figure, names)


def schedule_chart(panels: Mapping[str, Spans], unit: float = 1.0) -> Figure:
    """A panel per title, with a row for each rank: its actions over time, with the number of the micro-batch.

    Of several stages on a rank, later ones are darker. White is the bubble; its share stands in the title. Time is in
    forwards, which are `unit` long, from the first action.
    """
    titled = {}
    for title, spans in panels.items():
        zero = min(start for row in spans for _, start, _ in row)
        moved = [[(action, (start - zero) / unit, (end - zero) / unit) for action, start, end in row] for row in spans]
        titled[f"{title}: bubble {bubble(spans):.1%}"] = moved
    figure, drawn = style.panels_with_lanes(titled, inches=0.27, axis="time, in forwards")
    longest = max(end for spans in titled.values() for row in spans for *_, end in row)
    for panel, spans in drawn:
        for rank, row in enumerate(spans):
            laps = sorted({action.stage for action, *_ in row})
            for action, start, end in row:
                color = _shade(_COLORS[_ACTIONS[action.kind]], laps.index(action.stage))
                ink = "white" if sum(color) < 1.75 else "#222222"
                draw_box(panel, start, rank - 0.42, end - start, 0.84, facecolor=color, edgecolor="white", lw=0.7)
                if end - start > 0.012 * longest:  # room for a number
                    write(panel, (start + end) / 2, rank, str(action.micro), ink, 7.5, va="center_baseline")
    figure.axes[-1].set_xlim(right=longest)
    names = {_ACTIONS[action.kind] for spans in panels.values() for row in spans for action, *_ in row}
    return _with_legend(figure, names)


def _draw_bars(panel: Axes, intervals: Sequence[Interval], zero: float, lane: tuple[float, float], name: str) -> None:
    bars = [(1e3 * (start - zero), 1e3 * (end - start)) for start, end in intervals]
    panel.broken_barh(bars, lane, lw=0, facecolor=_COLORS[name], hatch=_HATCHES.get(name), edgecolor=GREY)


def _with_legend(figure: Figure, names: set[str]) -> Figure:
    """With a legend of these names, and with time from 0 on."""
    figure.axes[-1].set_xlim(left=0)
    look = {"edgecolor": GREY, "lw": 0.3}
    shown = [name for name in _COLORS if name in names]
    patches = [Patch(facecolor=_COLORS[name], hatch=_HATCHES.get(name), label=name, **look) for name in shown]
    style.add_legend(figure, handles=patches, loc="outside upper right", ncols=len(patches))
    return figure


def _shade(color: str, lap: int) -> tuple[float, float, float]:
    """Darker with each lap."""
    hue, lightness, saturation = colorsys.rgb_to_hls(*to_rgb(color))
    return colorsys.hls_to_rgb(hue, lightness * 0.72**lap, saturation)
