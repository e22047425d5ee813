"""Which bytes stay in a host and which leave it: the ranks of two hosts, and what each has sent to which other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch

from scratch_ddp.course.plots.style import GREY, QUIET, SENT_COLOR, rank_color

_RADIUS = 0.17
_APART = 2.0  # between the hosts


@dataclass(frozen=True)
class HostTraffic:
    """`places`: for each of two hosts its ranks, from top to bottom. `sent`: {(source, destination): how much}."""

    places: Sequence[Sequence[int]]
    sent: Mapping[tuple[int, int], float]

    @property
    def out_of_a_host(self) -> float:
        """The most that leaves one host."""
        host_of = {rank: host for host, ranks in enumerate(self.places) for rank in ranks}
        out = [0.0] * len(self.places)
        for (source, destination), amount in self.sent.items():
            if host_of[source] != host_of[destination]:
                out[host_of[source]] += amount
        return max(out)


def host_traffic(panels: Mapping[str, HostTraffic], unit: str) -> Figure:
    """A panel per title: two hosts, their ranks, and an arrow for what each sent to another, in units named `unit`.

    Red arrows leave a host. What leaves one in all stands below each panel.
    """
    figure, axes = plt.subplots(1, len(panels), figsize=(3.1 * len(panels), 2.9), squeeze=False, layout="constrained")
    for panel, (title, traffic) in zip(axes.flat, panels.items(), strict=True):
        _draw(panel, traffic, unit)
        panel.set_title(title, fontsize=10)
    return figure


def _draw(panel: Axes, traffic: HostTraffic, unit: str) -> None:
    at = {}
    height = max(map(len, traffic.places)) - 1
    for host, ranks in enumerate(traffic.places):
        x = _APART * host
        panel.add_patch(
            FancyBboxPatch((x - 0.3, -height - 0.3), 0.6, height + 0.6, boxstyle="round,pad=0.12", fc="white", ec=QUIET)
        )
        panel.text(x, 0.62, f"host {'AB'[host]}", ha="center", fontsize=9, color=GREY)
        at |= {rank: (x, -float(row)) for row, rank in enumerate(ranks)}
    for (source, destination), amount in traffic.sent.items():
        _arrow(panel, at[source], at[destination], (destination, source) in traffic.sent, f"{amount:.2f}")
    for rank, place in at.items():
        panel.add_patch(Circle(place, _RADIUS, color=rank_color(rank), zorder=3))
        panel.text(*place, str(rank), ha="center", va="center", color="white", fontsize=9, zorder=4)
    out = f"{traffic.out_of_a_host:.2f} {unit} out of a host"
    panel.text(_APART / 2, -height - 0.75, out, ha="center", fontsize=9, color=SENT_COLOR)
    panel.set_xlim(-0.75, _APART + 0.75)
    panel.set_ylim(-height - 0.95, 0.85)
    panel.set_aspect("equal")
    panel.axis("off")


def _arrow(panel: Axes, start: tuple, end: tuple, both_ways: bool, text: str) -> None:
    leaves = start[0] != end[0]
    color = SENT_COLOR if leaves else GREY
    bend = 0.28 if both_ways else 0.0
    style = {"arrowstyle": "-|>", "mutation_scale": 11, "shrinkA": 11, "shrinkB": 11, "lw": 1.4, "color": color}
    panel.add_patch(FancyArrowPatch(start, end, connectionstyle=f"arc3,rad={bend}", zorder=2, **style))
    share = 0.5 if start[1] == end[1] or not leaves else 0.33  # the labels of crossing arrows stand apart
    dx, dy = end[0] - start[0], end[1] - start[1]
    aside = bend / 2 if leaves else 1.25 * bend  # beside the arrow where two are close together
    x, y = start[0] + share * dx + aside * dy, start[1] + share * dy - aside * dx
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    panel.text(x, y, text, ha="center", va="center", fontsize=8, color=color, zorder=5, bbox=box)
