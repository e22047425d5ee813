"""Pictures of what the ranks hold and send, drawn from what they really held and sent."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

RANK_COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#76b7b2", "#edc948", "#e15759", "#9c755f")
SUM_COLOR = "#3b3b3b"

Row = Sequence[float]


def holdings_atlas(seen: dict[str, Sequence[tuple[Row, Row]]], columns: int = 4) -> Figure:
    """A panel for each collective: what every rank held before and after.

    `seen[name][rank]` is (before, after), two rows of numbers. A number between 10·(r+1) and 10·(r+1)+9 is drawn in
    rank r's colour, a larger one (a sum) dark, a missing or zero one as an empty cell.
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


def _draw_holdings(panel: Axes, ranks: Sequence[tuple[Row, Row]], n: int) -> None:
    for rank, (before, after) in enumerate(ranks):
        y = n - 1 - rank
        _draw_row(panel, 0, y, before, n)
        panel.annotate("", (n + 1.3, y + 0.4), (n + 0.3, y + 0.4), arrowprops={"arrowstyle": "->", "color": "#999"})
        _draw_row(panel, n + 1.6, y, after, n)
        panel.text(-0.25, y + 0.4, str(rank), ha="right", va="center", fontsize=8, color="#777")
    panel.set_xlim(-0.8, 2 * n + 1.7)
    panel.set_ylim(-0.1, n)
    panel.axis("off")


def _draw_row(panel: Axes, x: float, y: float, row: Row, n: int) -> None:
    for slot in range(n):
        value = row[slot] if slot < len(row) else 0
        panel.add_patch(Rectangle((x + slot, y), 0.92, 0.8, facecolor=_color(value, n), edgecolor="#cccccc", lw=0.6))
        if value:
            size = 6.5 if value >= 100 else 7.5
            panel.text(x + slot + 0.46, y + 0.38, f"{value:g}", ha="center", va="center", fontsize=size, color="white")


def _color(value: float, n: int) -> str:
    if not value:
        return "white"
    owner = int(value) // 10 - 1
    return RANK_COLORS[owner % len(RANK_COLORS)] if 0 <= owner < n else SUM_COLOR
