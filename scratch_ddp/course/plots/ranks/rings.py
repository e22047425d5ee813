"""How a ring adds up a tensor, chunk by chunk and step by step."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from scratch_ddp.course.plots.style import GREY, QUIET, SENT_COLOR, SUM_COLOR, rank_color

WIDTH, GAP = 10, 0.16  # inches: of a figure, between its panels


class Frame(NamedTuple):
    """What one rank holds after a step.

    `held`: per chunk, the sum of 10**r over all ranks r that have contributed to it, such as 1011 for ranks 0, 1 and 3.
    `arrived`: the chunks received in this step. `sent`: bytes that the rank has sent so far.
    """

    held: Sequence[float]
    arrived: Sequence[int] = ()
    sent: int = 0


Walk = Sequence[Sequence[Frame]]  # [rank][step]


def ring_frames(walks: dict[str, Walk], first: int = 0, tensor_bytes: int | None = None) -> Figure:
    """A row of panels per walk and a panel per step, which has a row per rank and a column per chunk.

    A stripe in a rank's colour means that this rank has contributed to the chunk. A complete chunk is dark, and chunks
    received in the step have a red frame. `first` is the number of the first step shown. With `tensor_bytes` (S), a red
    bar under each panel shows how many S the rank that sent the most has sent so far.
    """
    steps = max(len(walk[0]) for walk in walks.values())
    left, above, below = 0.6, 0.5, 0.62 if tensor_bytes else 0.25  # inches around the panels of a walk
    side = min((WIDTH - left) / steps - GAP, 1.6)
    size = (left + steps * (side + GAP), (above + side + below) * len(walks))
    figure = plt.figure(figsize=size)
    longest = max(frames[-1].sent for walk in walks.values() for frames in walk)
    for number, (title, walk) in enumerate(walks.items()):
        bottom = size[1] - (above + side + below) * number - above - side
        figure.text(left / size[0], (bottom + side + 0.28) / size[1], title, fontsize=11, weight="bold")
        for step, frames in enumerate(zip(*walk, strict=True)):
            x = left + step * (side + GAP)
            panel = figure.add_axes((x / size[0], bottom / size[1], side / size[0], side / size[1]))
            panel.set_title(f"step {first + step}" if first + step else "start", fontsize=9, pad=3)
            _draw_step(panel, frames, named=step == 0)
            if tensor_bytes:
                _draw_bar(panel, max(frame.sent for frame in frames), longest, tensor_bytes)
    return figure


def _draw_step(panel: Axes, frames: Sequence[Frame], named: bool) -> None:
    n = len(frames)
    for rank, frame in enumerate(frames):
        for chunk, value in enumerate(frame.held):
            _draw_chunk(panel, chunk, rank, _contributors(value), n)
        # if all chunks arrived: one frame around the row
        came = [(0, n)] if len(frame.arrived) == n else [(chunk, 1) for chunk in frame.arrived]
        for x, width in came:
            style = {"fill": False, "edgecolor": SENT_COLOR, "lw": 1.5, "zorder": 3, "clip_on": False}
            panel.add_patch(Rectangle((x + 0.03, rank + 0.03), width - 0.06, 0.94, **style))
    panel.set_xlim(0, n)
    panel.set_ylim(n, 0)
    ranks = [f"rank {rank}" for rank in range(n)] if named else []
    panel.set_yticks([rank + 0.5 for rank in range(len(ranks))], ranks, fontsize=8, color=GREY)
    panel.set_xticks([chunk + 0.5 for chunk in range(n)], range(n), fontsize=8, color=GREY)
    panel.tick_params(length=0, pad=2)
    panel.spines[:].set_visible(False)


def _draw_chunk(panel: Axes, chunk: int, rank: int, contributors: set[int], n: int) -> None:
    complete = len(contributors) == n
    _draw_box(panel, chunk, rank, facecolor=SUM_COLOR if complete else "#f4f4f4", edgecolor=QUIET, lw=0.6)
    for contributor in () if complete else contributors:
        x, width = chunk + 0.12 + 0.76 * contributor / n, 0.76 / n
        panel.add_patch(Rectangle((x, rank + 0.12), width, 0.76, facecolor=rank_color(contributor), lw=0))


def _draw_box(panel: Axes, x: int, y: int, **style: Any) -> None:
    panel.add_patch(Rectangle((x + 0.07, y + 0.07), 0.86, 0.86, **style))


def _draw_bar(panel: Axes, sent: int, longest: int, tensor_bytes: int) -> None:
    """A bar under the panel; the longest of all is as wide as a panel."""
    n = panel.get_xlim()[1]
    width, height = n * sent / longest, 0.09 * n
    bar = Rectangle((0, 1.19 * n), width, height, facecolor=SENT_COLOR, clip_on=False)
    panel.add_patch(bar)
    panel.text(0, 1.4 * n, f"{sent / tensor_bytes:.2f}·S sent", fontsize=9, color=SENT_COLOR, va="center")


def _contributors(value: float) -> set[int]:
    digits = str(int(value))[::-1]
    if set(digits) - {"0", "1"} or value != int(value):
        raise ValueError(f"{value:g} is no sum of different powers of ten: a rank's part is in it twice")
    return {rank for rank, digit in enumerate(digits) if digit == "1"}
