"""Steps of one model that is split in several ways, on several links: forecast and measured."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from scratch_ddp.course.plots.style import GREY, draw_quiet_axes, rank_color

Steps = Mapping[str, Mapping[str, float]]  # link -> way -> milliseconds


def ways_on_links(forecast: Steps, measured: Steps | None = None, alone: float | None = None) -> Figure:
    """A group for each link, in it a column for each way; a short black line across it is the forecast.

    Without `measured` the columns are the forecasts themselves, in pale. `alone`: milliseconds of one GPU, as a dashed
    line. The axis is logarithmic.
    """
    figure, panel = plt.subplots(figsize=(8.2, 3.8), layout="constrained")
    ways = list(next(iter(forecast.values())))
    width = 0.8 / len(ways)
    for number, way in enumerate(ways):
        for group, link in enumerate(forecast):
            place = group + (number - (len(ways) - 1) / 2) * width
            expected = forecast[link][way]
            found = (measured or forecast)[link][way]
            label = way if group == 0 else None
            style = {"alpha": 1.0 if measured else 0.45, "color": rank_color(number), "label": label}
            panel.bar(place, found, 0.9 * width, **style)
            panel.annotate(f"{found:.0f}", (place, found), (0, 2), textcoords="offset points", ha="center", fontsize=7)
            panel.plot([place - 0.45 * width, place + 0.45 * width], [expected] * 2, color="black", lw=1.4)
    if alone:
        panel.axhline(alone, color=GREY, lw=1, ls="--", label=f"one GPU: {alone:.1f} ms")
    panel.set_yscale("log")
    panel.set_xticks(range(len(forecast)), list(forecast))
    panel.set_ylabel("step, ms", fontsize=9)
    panel.plot([], [], color="black", lw=1.4, label="forecast")
    panel.legend(fontsize=8, frameon=False, loc="upper left", ncols=2)
    draw_quiet_axes(panel)
    return figure
