"""What ranks hold at each moment of a memory ledger: an element is a square."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from scratch_ddp.course.plots.style import GREY, QUIET, SENT_COLOR, SUM_COLOR, rank_color
from scratch_ddp.instruments.memory import Held, Moment

# In squares; the y axis points down.
SIDE = 4  # elements in a row
STEP = SIDE + 1.5  # from one moment to the next
ABOVE, BELOW = 2.4, 2.2  # a strip, for its title and what is sent
LEFT, TOP, BOTTOM = 8.0, 2.2, 7.0  # around all strips
BETWEEN = 0.5  # between two kinds, if heights need not be compared
SQUARE = 0.115  # inches

WEIGHTS = ("own", "borrowed")  # the kinds that are weights


def memory_strips(
    strips: dict[str, Sequence[Moment]],
    kinds: Sequence[str] = WEIGHTS,
    rank: int | None = None,
    parts: dict[str, int] | None = None,
    line: tuple[int, str] | None = None,
) -> Figure:
    """A strip per title with a column per moment: the squares are the elements that a rank holds then.

    `kinds`: those of the ledger to draw, each in its own band, from the bottom up. "own" has the rank's colour, row
    i of "borrowed" that of rank i; "partial" (a gradient of this rank's items alone) is frames in the rank's
    colour, "summed" is dark, any other kind grey. `rank`: whose strips they are; by default strip i is rank i's.
    `parts`: {name: number of moments}, in order. `line`: (elements, name), a height to compare with. The elements that
    the rank sends in a moment stand in red.
    """
    bands = {title: _bands(moments, kinds, 0 if line else BETWEEN) for title, moments in strips.items()}
    height = max(line[0] / SIDE if line else 0, *(sum(rows.values()) for rows in bands.values()))
    longest = max(strips.values(), key=len)
    width, pitch = len(longest) * STEP, ABOVE + height + BELOW
    bottom = len(strips) * pitch
    panel = _new_panel(width, bottom)
    for number, (title, moments) in enumerate(strips.items()):
        floor = (number + 1) * pitch - BELOW
        _draw_title(panel, floor - height - 0.6, title, moments, kinds)
        _draw_sent(panel, floor + 0.9, moments)
        _draw_strip(panel, floor, moments, bands[title], number if rank is None else rank)
        if line:
            _draw_line(panel, floor - line[0] / SIDE, width, line[1] if number == 0 else "")
    for column, moment in enumerate(longest):
        at = (column * STEP + SIDE / 2 + 0.8, bottom)
        panel.text(*at, moment.name, fontsize=9, rotation=40, rotation_mode="anchor", ha="right", va="top")
    _draw_parts(panel, parts or {}, bottom)
    return panel.figure


def _bands(moments: Sequence[Moment], kinds: Sequence[str], between: float) -> dict[str, float]:
    """The most rows that each kind takes, plus the gap above it."""
    rows = {kind: max(_rows(moment, kind) for moment in moments) for kind in kinds}
    return {kind: tall + between for kind, tall in rows.items() if tall}


def _rows(moment: Moment, kind: str) -> int:
    return sum(_rows_of(held.elements) for held in moment.held if held.kind == kind)


def _rows_of(elements: int) -> int:
    return -(-elements // SIDE)


def _new_panel(width: float, bottom: float) -> Axes:
    across, down = LEFT + width, TOP + bottom + BOTTOM
    figure = plt.figure(figsize=(SQUARE * across, SQUARE * down))
    panel = figure.add_axes((0, 0, 1, 1))
    panel.set_xlim(-LEFT, width)
    panel.set_ylim(bottom + BOTTOM, -TOP)
    panel.axis("off")
    return panel


def _draw_title(panel: Axes, y: float, title: str, moments: Sequence[Moment], kinds: Sequence[str]) -> None:
    text = f"sends {sum(moment.sent for moment in moments)}, holds at most {_most(moments, WEIGHTS)} weights"
    if set(kinds) - set(WEIGHTS):
        text += f", {_most(moments, kinds)} numbers in all"
    name = panel.text(0, y, title, fontsize=11, weight="bold")
    behind = {"xycoords": name, "xytext": (10, 0), "textcoords": "offset points", "va": "bottom"}
    behind["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0}  # a part may begin behind the text
    panel.annotate(text, (1, 0), fontsize=10, color=GREY, **behind)


def _most(moments: Sequence[Moment], kinds: Sequence[str]) -> int:
    return max(moment.elements(*kinds) for moment in moments)


def _draw_sent(panel: Axes, y: float, moments: Sequence[Moment]) -> None:
    style = {"fontsize": 9, "va": "center", "color": SENT_COLOR}
    panel.text(-0.8, y, "sends", ha="right", **style)
    for column, moment in enumerate(moments):
        if moment.sent:
            panel.text(column * STEP + SIDE / 2, y, moment.sent, ha="center", weight="bold", **style)


def _draw_strip(panel: Axes, floor: float, moments: Sequence[Moment], bands: dict[str, float], rank: int) -> None:
    for kind, rows in bands.items():
        panel.text(-0.8, floor - rows / 2, kind, fontsize=9, ha="right", va="center", color=GREY)
        for column, moment in enumerate(moments):
            y = floor
            for held in moment.held:
                if held.kind == kind:
                    y = _draw_tensor(panel, column * STEP, y, held, rank)
        floor -= rows


def _draw_tensor(panel: Axes, x: float, floor: float, held: Held, rank: int) -> float:
    """Draw a tensor's rows, the first one on top; return the floor of the next tensor."""
    rows = _rows_of(held.elements)
    for element in range(held.elements):
        row, column = divmod(element, SIDE)
        corner = (x + column + 0.08, floor - rows + row + 0.08)
        panel.add_patch(Rectangle(corner, 0.84, 0.84, **_style(held.kind, rank, row)))
    if rows > 1:
        middle = (x + SIDE / 2, floor - rows / 2)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.2}
        panel.text(*middle, held.name, fontsize=8.5, weight="bold", ha="center", va="center", bbox=box)
    return floor - rows


def _style(kind: str, rank: int, row: int) -> dict[str, Any]:
    if kind == "partial":
        return {"facecolor": "white", "edgecolor": rank_color(rank), "lw": 1.1}
    colors = {"own": rank_color(rank), "borrowed": rank_color(row), "summed": SUM_COLOR}
    return {"facecolor": colors.get(kind, QUIET), "lw": 0}


def _draw_line(panel: Axes, y: float, width: float, name: str) -> None:
    panel.plot([0, width - STEP + SIDE], [y, y], "--", color=SUM_COLOR, lw=1)
    panel.text(-0.8, y, name, fontsize=9, ha="right", va="center", color=SUM_COLOR)


def _draw_parts(panel: Axes, parts: dict[str, int], bottom: float) -> None:
    begins = 0
    for name, moments in parts.items():
        x = begins * STEP
        panel.text(x, -0.9, name, fontsize=11, color=SUM_COLOR, style="italic")
        if begins:
            panel.plot([x - (STEP - SIDE) / 2] * 2, [-1.8, bottom - 0.6], color=QUIET, lw=1, zorder=0)
        begins += moments
