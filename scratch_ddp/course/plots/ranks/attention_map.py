"""Which rank computed which score of an attention."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from scratch_ddp.course.plots.style import GREY, draw_quiet_frame, rank_color


def attention_map(computed: Mapping[str, Sequence[torch.Tensor]]) -> Figure:
    """A panel for each name: a square for every pair of a query (row) and a key (column), in its rank's colour.

    `computed[name][rank]`: bool (tokens, tokens), true where that rank computed the pair's score. White: nobody did.
    Beneath stand the ranks' numbers of pairs.
    """
    figure, panels = plt.subplots(
        1, len(computed), figsize=(3.9 * len(computed), 4.3), layout="constrained", squeeze=False
    )
    for panel, (name, ranks) in zip(panels[0], computed.items(), strict=True):
        _draw_map(panel, ranks)
        panel.set_title(name, fontsize=11, loc="left")
    panels[0][0].set_ylabel("query's position", fontsize=9)
    return figure


def _draw_map(panel: Axes, ranks: Sequence[torch.Tensor]) -> None:
    tokens, n = len(ranks[0]), len(ranks)
    picture = torch.ones(tokens, tokens, 3)
    for rank, pairs in enumerate(ranks):
        picture[pairs.cpu()] = torch.tensor(to_rgb(rank_color(rank)))
    panel.imshow(picture.numpy(), extent=(0, tokens, tokens, 0), interpolation="nearest")
    panel.set_xlabel("key's position", fontsize=9)
    panel.set_xticks(range(0, tokens + 1, tokens // 4))
    panel.set_yticks(range(0, tokens + 1, tokens // 4))
    draw_quiet_frame(panel)
    for rank, pairs in enumerate(ranks):
        place = (rank + 0.5) / n
        panel.text(
            place,
            -0.2,
            f"rank {rank}",
            color=rank_color(rank),
            fontsize=9,
            ha="center",
            weight="bold",
            transform=panel.transAxes,
        )
        panel.text(place, -0.27, f"{int(pairs.sum())}", color=GREY, fontsize=10, ha="center", transform=panel.transAxes)
