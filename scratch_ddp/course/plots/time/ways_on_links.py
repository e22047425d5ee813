"""One model, split in several ways, on several links: how many times as fast as one GPU it is trained."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from scratch_ddp.course.plots.style import GREY, draw_quiet_axes, rank_color

Steps = Mapping[str, Mapping[str, float]]  # link -> way -> seconds


def ways_on_links(measured: Steps, forecast: Steps, alone: float, gpus: int = 2) -> Figure:
    """A group for each link, in it a column for each way: `alone` / measured. A black line across it is the forecast.

    `alone`: seconds of a step on one GPU, which is the dashed line at 1; the one at `gpus` is what can be hoped for.
    """
    figure, panel = plt.subplots(figsize=(8.2, 3.8), layout="constrained")
    ways = list(next(iter(measured.values())))
    width = 0.8 / len(ways)
    for number, way in enumerate(ways):
        places = [group + (number - (len(ways) - 1) / 2) * width for group in range(len(measured))]
        speeds = [alone / steps[way] for steps in measured.values()]
        panel.bar(places, speeds, 0.9 * width, color=rank_color(number), label=way)
        for place, speed, link in zip(places, speeds, measured, strict=True):
            high = speed > 0.25 * gpus  # room for the number inside
            style = {"ha": "center", "fontsize": 8, "color": "white" if high else "black"}
            panel.annotate(f"{speed:.2f}", (place, speed), (0, -13 if high else 4), textcoords="offset points", **style)
            ends = [place - 0.45 * width, place + 0.45 * width]
            panel.plot(ends, [alone / forecast[link][way]] * 2, color="black", lw=1.4)
    for speed in (1, gpus):
        panel.axhline(speed, color=GREY, lw=1, ls="--", zorder=0)
    panel.plot([], [], color="black", lw=1.4, label="forecast")
    panel.set_xticks(range(len(measured)), list(measured))
    panel.set_ylabel("times as fast as one GPU", fontsize=9)
    panel.set_ylim(0, 1.25 * gpus)
    panel.legend(fontsize=8, frameon=False, loc="upper center", ncols=len(ways) + 1)
    draw_quiet_axes(panel)
    return figure
