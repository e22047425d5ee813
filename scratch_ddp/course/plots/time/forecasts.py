"""Forecasts beside measurements: a curve that dots land on, and a diagonal."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

from scratch_ddp.course.plots.style import GREY, SENT_COLOR, SUM_COLOR, draw_quiet_axes, rank_color


def forecast_curve(
    tokens: Sequence[int], forecast: Sequence[float], measured: Mapping[int, float], knee: float, compute: float
) -> Figure:
    """Seconds of a step for each token a device has: a line, and dots where it was measured.

    `knee`: the tokens from which on the step is compute-bound; `compute`: seconds of computing for a token.
    """
    figure, panel = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    panel.plot(tokens, [1e3 * each / t for t, each in zip(tokens, forecast, strict=True)], color=SUM_COLOR, lw=1.4)
    places = [1e3 * seconds / t for t, seconds in measured.items()]
    panel.plot(list(measured), places, "o", color=rank_color(0), label="measured")
    panel.axhline(1e3 * compute, color=GREY, lw=1, ls="--", label="computing alone")
    panel.axvline(knee, color=SENT_COLOR, lw=1, label="compute-bound from here on")
    panel.set_xscale("log")
    panel.set_xticks(list(measured), [str(each) for each in measured])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_ylim(0)
    panel.set_xlabel("tokens of a device", fontsize=9)
    panel.set_ylabel("ms of a step for each", fontsize=9)
    panel.legend(fontsize=8, frameon=False)
    draw_quiet_axes(panel)
    return figure


def forecast_diagonal(forecast: Mapping[str, float], measured: Mapping[str, float]) -> Figure:
    """A dot for each layout: forecast milliseconds against measured ones. On the line they are the same."""
    figure, panel = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
    values = [1e3 * each for each in (*forecast.values(), *measured.values())]
    ends = 0.85 * min(values), 1.18 * max(values)
    panel.plot(ends, ends, color=GREY, lw=1)
    for number, name in enumerate(sorted(measured, key=forecast.__getitem__)):
        at = 1e3 * forecast[name], 1e3 * measured[name]
        panel.plot(*at, "o", color=rank_color(number), label=name)
    for axis, scale in ((panel.xaxis, panel.set_xscale), (panel.yaxis, panel.set_yscale)):
        scale("log")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FormatStrFormatter("%g"))
        axis.set_minor_locator(NullLocator())
    panel.set_xlim(ends)
    panel.set_ylim(ends)
    panel.set_xlabel("forecast, ms", fontsize=9)
    panel.set_ylabel("measured, ms", fontsize=9)
    panel.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    draw_quiet_axes(panel)
    return figure
