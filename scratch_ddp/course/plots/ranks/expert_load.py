"""How many rows each rank sent to each expert, and how many each expert got."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scratch_ddp.course.plots.style import GREY, draw_quiet_axes, rank_color


def expert_load(sent: Mapping[str, torch.Tensor]) -> Figure:
    """A panel for each name, a column for each expert: the rows it got, in the colours of the ranks that sent them.

    `sent[name]`: whole numbers (ranks, experts), rows sent by each rank to each expert. Beneath each expert stands the
    rank that holds it. The dashed line is an equal share.
    """
    figure, panels = plt.subplots(
        1, len(sent), figsize=(4.3 * len(sent), 3.2), layout="constrained", sharey=True, squeeze=False
    )
    for panel, (name, table) in zip(panels[0], sent.items(), strict=True):
        _draw_load(panel, table.cpu())
        panel.set_title(name, fontsize=11, loc="left")
    panels[0][0].set_ylabel("rows", fontsize=9)
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right center", fontsize=8, frameon=False)
    return figure


def _draw_load(panel: Axes, table: torch.Tensor) -> None:
    n, experts = table.shape
    places, below = list(range(experts)), torch.zeros(experts)
    for rank, row in enumerate(table):
        panel.bar(places, row.tolist(), 0.8, below.tolist(), color=rank_color(rank), label=f"from rank {rank}")
        below = below + row
    for place, total in zip(places, below.tolist(), strict=True):
        panel.annotate(f"{total:.0f}", (place, total), (0, 2), textcoords="offset points", ha="center", fontsize=8)
    share = table.sum().item() / experts
    panel.axhline(share, color=GREY, lw=1, ls="--", label="an equal share")
    panel.set_xticks(places, [str(place) for place in places])
    for rank in range(n):
        panel.text(
            (rank + 0.5) * experts / n - 0.5,
            -0.15,
            f"rank {rank}",
            ha="center",
            fontsize=8,
            color=rank_color(rank),
            weight="bold",
            transform=panel.get_xaxis_transform(),
        )
    draw_quiet_axes(panel)
    panel.set_xlabel("expert, and the rank that holds it", fontsize=9, labelpad=16)
