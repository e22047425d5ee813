"""What every rank held before and after each collective."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from scratch_ddp.course.plots.style import SUM_COLOR, rank_color

_EMPTY, _UNDEFINED = "white", "#dddddd"

Slots = Sequence[float | str | None]


def holdings_atlas(seen: dict[str, Sequence[tuple[Slots, Slots]]], columns: int = 4) -> Figure:
    """A panel per collective: what every rank held before and after.

    `seen[name][rank]` is (before, after), each with at most n entries for n ranks. A number from 10·r to 10·r+9 has the
    colour of rank r, a larger number (a sum) is dark, "?" (undefined) is grey, None or a missing entry is empty.
    """
    n = len(next(iter(seen.values())))
    rows = -(-len(seen) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3.1 * columns, 0.42 * n * rows + 0.5 * rows), squeeze=False)
    for panel in axes.flat[len(seen) :]:
        panel.remove()
    for panel, (name, ranks) in zip(axes.flat, seen.items(), strict=False):
        _draw_holdings(panel, ranks, n)
        panel.set_title(name, fontsize=11, loc="left", family="monospace")
    figure.tight_layout()
    return figure


def _draw_holdings(panel: Axes, ranks: Sequence[tuple[Slots, Slots]], n: int) -> None:
    for rank, (before, after) in enumerate(ranks):
        y = n - 1 - rank
        _draw_row(panel, 0, y, before, n)
        panel.annotate("", (n + 1.3, y + 0.4), (n + 0.3, y + 0.4), arrowprops={"arrowstyle": "->", "color": "#999"})
        _draw_row(panel, n + 1.6, y, after, n)
        panel.text(-0.2, y + 0.4, f"rank {rank}", ha="right", va="center", fontsize=7, color="#777")
    panel.set_xlim(-1.7, 2 * n + 1.7)
    panel.set_ylim(-0.1, n)
    panel.axis("off")


def _draw_row(panel: Axes, x: float, y: float, slots: Slots, n: int) -> None:
    style = {"ha": "center", "va": "center", "fontsize": 7.5, "weight": "bold"}
    for slot in range(n):
        value = slots[slot] if slot < len(slots) else None
        panel.add_patch(Rectangle((x + slot, y), 0.92, 0.8, facecolor=_color(value, n), edgecolor="#cccccc", lw=0.6))
        if value is not None:
            text = value if isinstance(value, str) else f"{value:g}"
            panel.text(x + slot + 0.46, y + 0.37, text, color="#555555" if value == "?" else "white", **style)


def _color(value: float | str | None, n: int) -> str:
    if value is None:
        return _EMPTY
    if isinstance(value, str):
        return _UNDEFINED
    owner = int(value) // 10
    return rank_color(owner) if owner < n else SUM_COLOR
