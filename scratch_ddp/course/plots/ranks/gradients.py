"""The gradients of several ranks, in the plane of a model with two parameters."""

from collections.abc import Callable, Sequence

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scratch_ddp.course.plots.style import QUIET, SUM_COLOR, draw_quiet_frame, rank_color

_BIG_BATCH = "#f2c14e"
_GRID = 80  # points per side at which the loss is computed


def gradient_arrows(
    loss: Callable[[torch.Tensor], torch.Tensor],
    start: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    whole: torch.Tensor,
) -> Figure:
    """Arrows of each rank's gradient and of their mean from `start`, on the contours of the loss.

    `loss` takes the two parameters as a tensor of shape (2,), `gradients` holds a tensor of shape (2,) per rank, and
    `whole` is the gradient of the whole batch. Arrows point downhill, from `start` to `start` minus the gradient. The
    left panel shows them in full length, the right one each rank's divided by the number of ranks, in a chain.
    """
    steps = [-gradient.detach() for gradient in gradients]
    chain = torch.stack([start.detach(), *steps])
    chain[1:] /= len(steps)
    chain = chain.cumsum(0)  # each part of an arrow begins where the one before ends
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 3.9), layout="constrained")
    _draw_contours(left, loss, torch.stack([start.detach(), *(start.detach() + step for step in steps)]))
    _draw_contours(right, loss, chain)
    for panel in (left, right):
        _draw_arrow(panel, start, -whole, _BIG_BATCH, width=10, name="whole batch")
        panel.plot(*start.tolist(), "o", color="black", ms=5, zorder=6)
    for rank, step in enumerate(steps):
        _draw_arrow(left, start, step, rank_color(rank), width=2.5, name=f"rank {rank}")
        _draw_arrow(right, chain[rank], chain[rank + 1] - chain[rank], rank_color(rank), width=2.5)
    _draw_arrow(left, start, sum(steps) / len(steps), SUM_COLOR, width=1.6, name="mean of the ranks")
    left.set_title("minus each gradient, and their mean", fontsize=10, loc="left")
    right.set_title(f"1/{len(steps)} of each, end to end (closer)", fontsize=10, loc="left")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=len(steps) + 2, frameon=False)
    return figure


def _draw_contours(panel: Axes, loss: Callable[[torch.Tensor], torch.Tensor], shown: torch.Tensor) -> None:
    """The loss in a square that contains all points of `shown`, of shape (points, 2)."""
    middle = (shown.min(0).values + shown.max(0).values) / 2
    half = 0.62 * (shown.max(0).values - shown.min(0).values).max()
    across, up = (torch.linspace(middle[i] - half, middle[i] + half, _GRID, dtype=shown.dtype) for i in range(2))
    height = torch.stack([torch.stack([loss(torch.stack([a, b])) for a in across]) for b in up]).detach()
    levels = torch.logspace(height.min().log10() + 0.05, height.max().log10(), 14).tolist()
    panel.contour(across, up, height, levels=levels, colors=QUIET, linewidths=0.8, zorder=1)
    panel.set_aspect("equal")
    panel.set_xlabel("w[0]", fontsize=9)
    panel.set_ylabel("w[1]", fontsize=9)
    draw_quiet_frame(panel)


def _draw_arrow(
    panel: Axes, at: torch.Tensor, step: torch.Tensor, color: str, width: float, name: str | None = None
) -> None:
    """`width` is in points. The tip is exactly at the end, even of a wide arrow."""
    head = {"headwidth": 2 + 4 / width, "headlength": 1.5 + 8 / width, "headaxislength": 1.5 + 8 / width}
    exact = {"angles": "xy", "scale_units": "xy", "scale": 1, "units": "dots"}
    dots = width * panel.figure.dpi / 72
    panel.quiver(*at.tolist(), *step.tolist(), color=color, width=dots, zorder=5 - width / 10, **head, **exact)
    panel.plot([], [], color=color, lw=width, label=name)
