"""What all pictures share: colours that mean the same thing everywhere, quiet panels, lanes of ranks, plain legends."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.patches import Rectangle

T = TypeVar("T")

RANK_COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#76b7b2", "#edc948", "#e15759", "#9c755f")
SUM_COLOR = "#3b3b3b"  # what all ranks have contributed to
SENT_COLOR = "#d4001a"  # what is sent, and how much of it
QUIET = "#c8c8c8"  # frames, grids and other lines in the background
GREY = "#666666"  # secondary text


def rank_color(rank: int) -> str:
    """The colour of a rank. There are eight; rank 8 has that of rank 0 again."""
    return RANK_COLORS[rank % len(RANK_COLORS)]


def quiet_panels(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, list]:
    """A figure of this size in inches, and its panels: small text, and light grey axes at the left and bottom alone.

    `options`: those of `plt.subplots`.
    """
    options = {"layout": "constrained", "squeeze": False} | options
    figure, axes = plt.subplots(rows, columns, figsize=(width, height), **options)
    for panel in axes.flat:
        panel.tick_params(length=2, color=QUIET, labelsize=8)
        panel.spines[:].set_color(QUIET)
        panel.spines[["top", "right"]].set_visible(False)
        panel.xaxis.label.set_size(9)
        panel.yaxis.label.set_size(9)
    return figure, list(axes.flat)


def titled_panels(
    contents: Mapping[str, T], width: float, height: float, down: bool = False, **options: Any
) -> tuple[Figure, list[tuple[Axes, T]]]:
    """Quiet panels, one per title, side by side or one below the other; with each panel comes what it is to show."""
    rows, columns = (len(contents), 1) if down else (1, len(contents))
    figure, panels = quiet_panels(width, height, rows, columns, **options)
    for panel, title in zip(panels, contents, strict=True):
        panel.set_title(title, fontsize=10, loc="left")
    return figure, list(zip(panels, contents.values(), strict=True))


def panels_with_lanes(
    contents: Mapping[str, Sequence[T]], inches: float, axis: str
) -> tuple[Figure, list[tuple[Axes, Sequence[T]]]]:
    """Titled panels with a lane for each rank, rank 0 on top; all have the same axis of time, named `axis`.

    `contents`: for each title an item per rank. `inches`: height of a lane.
    """
    lanes = [len(ranks) for ranks in contents.values()]
    height = inches * sum(lanes) + 0.42 * len(lanes) + 0.55
    figure, panels = titled_panels(contents, 8.6, height, down=True, sharex=True, height_ratios=lanes)
    for panel, ranks in panels:
        panel.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))])
        panel.set_ylim(len(ranks) - 0.5, -0.5)
    figure.axes[-1].set_xlabel(axis)
    return figure, panels


def add_legend(whose: Figure | Axes, *args: Any, **options: Any) -> Legend:
    """A legend in small text without a frame, of a figure or a panel; everything else is as for `legend`."""
    return whose.legend(*args, **({"fontsize": 8, "frameon": False} | options))


def draw_box(panel: Axes, x: float, y: float, width: float, height: float, **style: Any) -> None:
    """A rectangle with a corner at (x, y)."""
    panel.add_patch(Rectangle((x, y), width, height, **style))


def write(panel: Axes, x: float, y: float, text: str, color: str = GREY, size: float = 9, **style: Any) -> None:
    """Text around (x, y), `size` in points; `ha` and `va` move it beside the point."""
    panel.text(x, y, text, color=color, fontsize=size, **({"ha": "center", "va": "center"} | style))
