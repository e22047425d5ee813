"""What all pictures share: colours that mean the same thing everywhere, quiet axes, titled panels, lanes of ranks."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text

P, T = ParamSpec("P"), TypeVar("T")

RANK_COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#76b7b2", "#edc948", "#e15759", "#9c755f")
SUM_COLOR = "#3b3b3b"  # what all ranks have contributed to
SENT_COLOR = "#d4001a"  # what is sent, and how much of it
QUIET = "#c8c8c8"  # frames, grids and other lines in the background
GREY = "#666666"  # secondary text

_QUIET_STYLE = {
    "axes.edgecolor": QUIET,
    "axes.labelsize": 9,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "legend.fontsize": 8,
    "legend.frameon": False,
}


def rank_color(rank: int) -> str:
    """The colour of a rank. There are eight; rank 8 has that of rank 0 again."""
    return RANK_COLORS[rank % len(RANK_COLORS)]


def quiet(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Decorate a function that draws a figure: small text, light grey axes at the left and bottom, plain legends."""

    @functools.wraps(draw)
    def draw_quietly(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with plt.rc_context(_QUIET_STYLE):
            figure = draw(*args, **kwargs)
        for panel in figure.axes:  # matplotlib makes ticks when it needs them, which may be after the context
            panel.tick_params(length=2, color=QUIET, labelsize=8)
        return figure

    return draw_quietly


def titled_panels(
    contents: Mapping[str, T], size: tuple[float, float], down: bool = False, **options: Any
) -> tuple[Figure, list[tuple[Axes, T]]]:
    """A figure with a panel per title, side by side or one below the other, and with each panel what it is to show.

    `size`: of the figure, in inches. `options`: those of `plt.subplots`.
    """
    rows, columns = (len(contents), 1) if down else (1, len(contents))
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, **options)
    for panel, title in zip(axes.flat, contents, strict=True):
        panel.set_title(title, fontsize=10, loc="left")
    return figure, list(zip(axes.flat, contents.values(), strict=True))


def panels_with_lanes(
    contents: Mapping[str, Sequence[T]], inches: float, axis: str
) -> tuple[Figure, list[tuple[Axes, Sequence[T]]]]:
    """A panel per title with a lane for each rank, rank 0 on top; all have the same axis of time, named `axis`.

    `contents`: for each title an item per rank. `inches`: height of a lane.
    """
    lanes = [len(ranks) for ranks in contents.values()]
    size = (8.6, inches * sum(lanes) + 0.42 * len(lanes) + 0.55)
    figure, panels = titled_panels(contents, size, down=True, sharex=True, height_ratios=lanes)
    for panel, ranks in panels:
        panel.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))])
        panel.set_ylim(len(ranks) - 0.5, -0.5)
    figure.axes[-1].set_xlabel(axis)
    return figure, panels


def draw_box(panel: Axes, x: float, y: float, width: float, height: float, **style: Any) -> None:
    """A rectangle with a corner at (x, y)."""
    panel.add_patch(Rectangle((x, y), width, height, **style))


def write(panel: Axes, x: float, y: float, text: str, color: str = GREY, size: float = 9, **style: Any) -> Text:
    """Text around (x, y), `size` in points; `ha` and `va` move it beside the point."""
    return panel.text(x, y, text, color=color, fontsize=size, **({"ha": "center", "va": "center"} | style))
