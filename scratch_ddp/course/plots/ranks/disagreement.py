"""How much the ranks' gradients differ while micro-batches accumulate."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scratch_ddp.course.plots.style import QUIET, SENT_COLOR, SUM_COLOR, draw_quiet_axes

Event = tuple[str, float]


def disagreement_saw(panels: dict[str, Sequence[Event]]) -> Figure:
    """A panel per loop: the largest difference between the ranks' gradients over the micro-batches of an epoch.

    The events of a loop are, in order, ("backward", d) when a micro-batch's gradients have been accumulated, ("sync",
    d) after `sync_gradients`, and ("step", d) before an optimizer step, where d is the difference then. A step with the
    same gradients on all ranks is a dark dot, a step with different gradients a red cross.
    """
    figure, axes = plt.subplots(
        len(panels),
        1,
        figsize=(7.6, 1.25 * len(panels) + 0.85),
        squeeze=False,
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    for panel, (title, events) in zip(axes.flat, panels.items(), strict=True):
        _draw_saw(panel, events)
        panel.set_title(title, fontsize=10, loc="left", pad=4)
    last = axes.flat[-1]
    last.set_xlabel("micro-batch", fontsize=9)
    last.set_xticks(range(1, 1 + max(_count_micro_batches(events) for events in panels.values())))
    highest = max(apart for events in panels.values() for _, apart in events)
    last.set_ylim(-0.1 * highest, 1.15 * highest)
    figure.supylabel("difference between gradients" if len(panels) > 1 else "difference", fontsize=9)
    steps_apart = {apart != 0 for events in panels.values() for what, apart in events if what == "step"}
    _add_legend(figure, sorted(steps_apart))
    return figure


def _draw_saw(panel: Axes, events: Sequence[Event]) -> None:
    """Solid lines: the gradients. Dotted lines: a step has used them, and they are cleared."""
    micro_batch, at = 0, (0, 0.0)
    for what, apart in events:
        micro_batch += what == "backward"
        here = (micro_batch, apart)
        if what == "step":
            same = apart == 0
            panel.plot(*here, "o" if same else "X", color=SUM_COLOR if same else SENT_COLOR, ms=7, zorder=4)
            panel.plot([micro_batch] * 2, [apart, 0], ":", color=SENT_COLOR, lw=1.2, zorder=2)
            at = (micro_batch, 0.0)
        else:
            panel.fill_between(*zip(at, here, strict=True), color=QUIET, alpha=0.35, lw=0, zorder=0)
            panel.plot(*zip(at, here, strict=True), color=SUM_COLOR, lw=1.6, zorder=3, solid_capstyle="round")
            at = here
    panel.axhline(0, color=QUIET, lw=0.8, zorder=1)
    draw_quiet_axes(panel)


def _count_micro_batches(events: Sequence[Event]) -> int:
    return sum(what == "backward" for what, _ in events)


def _add_legend(figure: Figure, steps_apart: list[bool]) -> None:
    """Explain the marks that occur: False for steps with the same gradients, True for those with different ones."""
    marks = {
        False: ("a step, all ranks with the same gradient", "o", SUM_COLOR),
        True: ("a step, each rank with its own", "X", SENT_COLOR),
    }
    handles = [
        plt.Line2D([], [], ls="", ms=7, label=name, marker=marker, color=color)
        for name, marker, color in (marks[apart] for apart in steps_apart)
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=2, frameon=False, fontsize=9)
