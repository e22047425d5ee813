"""Sliced matrices: a product whose matrix is cut in two ways, and what a rank holds of each layer's output."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from scratch_ddp.course.plots.style import GREY, QUIET, SENT_COLOR, SUM_COLOR, rank_color

GAP = 1.1  # squares between two matrices
SQUARE = 0.34  # inches


def cut_products(
    x: torch.Tensor, w: torch.Tensor, by_columns: Sequence[torch.Tensor], by_rows: Sequence[torch.Tensor]
) -> Figure:
    """x @ w with w cut by columns (above) and by rows (below); `by_…`: what each rank has computed.

    A filled square is a number that is finished, in the colour of the rank that has it; a frame is a part of a sum;
    dark is a sum over all ranks.
    """
    n, (rows, inner), columns = len(by_columns), x.shape, w.shape[1]
    width = inner + (1 + n + 1) * (columns + GAP) + 3.2
    figure, panels = plt.subplots(2, 1, figsize=(SQUARE * (width + 1), 2 * SQUARE * (inner + 2)))
    by_column = [place * n // columns for place in range(columns)]  # the rank that has it
    by_row = [place * n // inner for place in range(inner)]
    for panel, title, parts in zip(panels, ("W cut by columns", "W cut by rows"), (by_columns, by_rows), strict=True):
        above = title.endswith("columns")
        panel.set(xlim=(-0.4, width), ylim=(inner + 0.4, -1.5))
        panel.set_aspect("equal")
        panel.axis("off")
        panel.text(0, -1.1, title, fontsize=11, weight="bold", va="center")
        colors = [[QUIET if above else rank_color(by_row[c]) for c in range(inner)]] * rows
        at = _draw(panel, 0, x, colors, "X", "·")
        colors = [[rank_color(by_column[c] if above else by_row[r]) for c in range(columns)] for r in range(inner)]
        at = _draw(panel, at, w, colors, "W", "→")
        for rank, part in enumerate(parts):
            colors = [[rank_color(rank)] * part.shape[1]] * rows
            sign = "" if rank == n - 1 else "" if above else "+"
            at = _draw(panel, at, part, colors, f"rank {rank}", sign, framed=not above)
        panel.text(at + 1, rows / 2 - 0.35, "all-gather" if above else "all-reduce", color=SENT_COLOR, **_NAME)
        panel.text(at + 1, rows / 2 + 0.35, "→", color=SENT_COLOR, **_NAME)
        whole = torch.cat(list(parts), dim=1) if above else sum(parts)
        colors = [[rank_color(by_column[c]) if above else SUM_COLOR for c in range(columns)]] * rows
        _draw(panel, at + 2.8, whole, colors, "Y, on both" if n == 2 else "Y, on all", "")
    figure.subplots_adjust(0, 0, 1, 1, hspace=0.05)
    return figure


_NAME = {"fontsize": 9, "ha": "center", "va": "center"}


def _draw(
    panel: Axes, left: float, matrix: torch.Tensor, colors: list[list[str]], name: str, sign: str, framed: bool = False
) -> float:
    """Draw a matrix of numbers from `left` on, and a sign behind it; return where the next one begins."""
    rows, columns = matrix.shape
    for row in range(rows):
        for column in range(columns):
            color = colors[row][column]
            style = {"facecolor": "white" if framed else color, "edgecolor": color if framed else "white"}
            panel.add_patch(Rectangle((left + column + 0.05, row + 0.05), 0.9, 0.9, lw=1.6, **style))
            ink = "black" if framed or color == QUIET else "white"
            panel.text(left + column + 0.5, row + 0.5, f"{matrix[row, column]:g}", color=ink, **_NAME)
    panel.text(left + columns / 2, -0.3, name, color=GREY, **_NAME)
    panel.text(left + columns + GAP / 2, 1, sign, color=GREY, **(_NAME | {"fontsize": 12}))
    return left + columns + GAP


class Station(NamedTuple):
    """A layer's output on one rank: its (tokens, features), those of the whole, and what was called before it."""

    name: str
    held: tuple[int, int]
    whole: tuple[int, int]
    calls: Sequence[str] = ()


def slice_layouts(plans: Mapping[str, Sequence[Station]], rank: int, n: int) -> Figure:
    """A strip per plan: each layer's output as tokens (down) × features (across), with what `rank` of n holds of it.

    In red: the collectives between one layer's output and the next.
    """
    stations = max(plans.values(), key=len)
    unit = max(station.whole[1] for station in stations)
    wide, tall, step = 1.0, 0.55, 1.45  # of the widest output; from one to the next
    figure, panels = plt.subplots(
        len(plans), 1, figsize=(1.15 * step * len(stations), 1.45 * len(plans)), squeeze=False
    )
    for (panel,), (title, strip) in zip(panels, plans.items(), strict=True):
        panel.set(xlim=(-0.55, step * len(strip) - 0.3), ylim=(tall + 0.4, -0.5))
        panel.axis("off")
        panel.text(-0.5, -0.36, title, fontsize=11, weight="bold", va="center")
        for place, (name, held, whole, calls) in enumerate(strip):
            left, width = place * step, wide * whole[1] / unit
            part = [have / all_ for have, all_ in zip(held, whole, strict=True)]
            first = [rank * share if share < 1 else 0 for share in part]  # slices are in the order of the ranks
            panel.add_patch(Rectangle((left, 0), width, tall, facecolor="white", edgecolor=QUIET))
            corner = (left + first[1] * width, first[0] * tall)
            panel.add_patch(Rectangle(corner, part[1] * width, part[0] * tall, facecolor=rank_color(rank), lw=0))
            panel.text(left + width / 2, tall + 0.14, name, fontsize=8.5, ha="center", va="center")
            shape = f"{held[0]} × {held[1]}"
            panel.text(left + width / 2, tall + 0.3, shape, fontsize=8, ha="center", va="center", color=GREY)
            if calls:
                text = "\n".join(each.replace("_", "-") for each in calls)
                panel.text(left - 0.04, -0.08, text, fontsize=8, ha="center", va="bottom", color=SENT_COLOR)
                panel.annotate("", (left - 0.04, tall / 2), (left - 0.04, -0.06), arrowprops=_ARROW)
    panels[-1, 0].text(-0.06, tall / 2, "tokens", fontsize=8, rotation=90, ha="right", va="center", color=GREY)
    figure.subplots_adjust(0, 0, 1, 1, hspace=0.12)
    return figure


_ARROW = {"arrowstyle": "-|>", "color": SENT_COLOR, "lw": 0.9}
