"""Who sends what to whom: round by round, and in and out of hosts."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from scratch_ddp.course.plots import style
from scratch_ddp.course.plots.style import GREY, QUIET, SENT_COLOR, SUM_COLOR, rank_color, write
from scratch_ddp.instruments.traffic import Message


def message_ladder(
    panels: Mapping[str, Sequence[Message]], n: int, source: int | None = None, parts: Mapping[str, int] | None = None
) -> Figure:
    """A panel per title: a line for each of the n ranks, with time from left to right and an arrow per message.

    The messages are those of `Totals.log`, which have the round in which each ended. With `source`, a rank's line is
    thick from the round on in which it has the source's values. Arrows have the colour of the sending rank. `parts`
    names groups of rounds, in order: {name: number of rounds}; a line separates two parts.
    """
    depths = [max(message.round for message in log) for log in panels.values()]
    width, height = min(10, sum(depths) + 0.9 * len(panels)), 0.38 * n + (0.95 if parts else 0.75)
    figure, drawn = style.titled_panels(panels, width, height, width_ratios=[depth + 0.5 for depth in depths])
    for (panel, log), depth in zip(drawn, depths, strict=True):
        panel.hlines(range(n), 0, depth + 0.15, color=QUIET, lw=1, zorder=1)
        for rank, since in _informed(log, source).items():
            panel.plot([since, depth + 0.15], [rank, rank], color=SUM_COLOR, lw=4, zorder=2, solid_capstyle="butt")
        for at, sender, receiver in log:
            arrow = {"arrowstyle": "-|>", "color": rank_color(sender), "lw": 2, "shrinkA": 0, "shrinkB": 2}
            panel.annotate("", (at, receiver), (at - 0.92, sender), arrowprops=arrow, zorder=3)
        panel.vlines([at + 0.04 for at in range(1, depth)], -0.4, n - 0.6, color=QUIET, lw=0.7, ls=":", zorder=0)
        panel.set(xlim=(-0.05, depth + 0.2), ylim=(n - 0.6, -0.4))
        panel.set_yticks(range(n), [f"rank {rank}" for rank in range(n)], fontsize=9)
        panel.set_xticks([at + 0.5 for at in range(depth)], [f"round {at + 1}" for at in range(depth)], fontsize=9)
        panel.tick_params(length=0)
        panel.spines[:].set_visible(False)
        begin = 0
        for name, rounds in (parts or {}).items():
            panel.axvline(begin + 0.04, color=SUM_COLOR, lw=1.5 if begin else 0)
            write(panel, begin + rounds / 2, n + 0.4, name, "black", 10, weight="bold")
            begin += rounds
    return figure


def _informed(log: Sequence[Message], source: int | None) -> dict[int, int]:
    """For each rank that the source's values reach: the round from which on it has them."""
    since = {} if source is None else {source: 0}
    for message in sorted(log):
        if since.get(message.sender, message.round) < message.round:
            since.setdefault(message.receiver, message.round)
    return since


class HostTraffic(NamedTuple):
    """The ranks of two hosts, and what they send."""

    places: Sequence[Sequence[int]]  # for each host its two ranks, from top to bottom
    sent: Mapping[tuple[int, int], float]  # {(source, destination): how much}


def host_traffic(panels: Mapping[str, HostTraffic], unit: str) -> Figure:
    """A panel per title: two hosts, their ranks, and an arrow for what each sent to another, in units named `unit`.

    Red arrows leave a host. What leaves one in all stands below each panel.
    """
    figure, drawn = style.titled_panels(panels, 3.1 * len(panels), 2.9)
    for panel, (places, sent) in drawn:
        at = {}
        for x, name, ranks in zip((0, 2), "AB", places, strict=True):
            look = {"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": QUIET}
            panel.add_patch(FancyBboxPatch((x - 0.3, -1.3), 0.6, 1.6, **look))
            write(panel, x, 0.7, f"host {name}")
            at |= {rank: (x, -row) for row, rank in enumerate(ranks)}
        for (source, destination), amount in sent.items():
            both_ways = (destination, source) in sent
            _draw_arrow(panel, at[source], at[destination], f"{amount:.2f}", both_ways)
        for rank, place in at.items():
            panel.plot(*place, "o", ms=20, color=rank_color(rank), zorder=3)
            write(panel, *place, str(rank), "white", zorder=4)
        out = max(sum(n for (a, b), n in sent.items() if a in ranks and b not in ranks) for ranks in places)
        write(panel, 1, -1.7, f"{out:.2f} {unit} out of a host", SENT_COLOR)
        panel.set(xlim=(-0.75, 2.75), ylim=(-1.95, 0.85), aspect="equal")
        panel.axis("off")
    return figure


def _draw_arrow(panel: Axes, start: tuple, end: tuple, text: str, both_ways: bool) -> None:
    (x, y), dx, dy = start, end[0] - start[0], end[1] - start[1]
    color = SENT_COLOR if dx else GREY
    bend = 0.28 if both_ways else 0.0
    look = {"arrowstyle": "-|>", "mutation_scale": 11, "shrinkA": 11, "shrinkB": 11, "lw": 1.4, "color": color}
    panel.add_patch(FancyArrowPatch(start, end, connectionstyle=f"arc3,rad={bend}", zorder=2, **look))
    share = 0.33 if dx and dy else 0.5  # the labels of crossing arrows stand apart
    aside = bend / 2 if dx else 1.25 * bend  # beside the arrow where two are close together
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    place = x + share * dx + aside * dy, y + share * dy - aside * dx
    write(panel, *place, text, color, 8, zorder=5, bbox=box)
