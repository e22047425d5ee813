"""The chart of steps over bucket sizes."""

import matplotlib
import matplotlib.pyplot as plt
import pytest

from scratch_ddp.course.plots import Sweep, bucket_sweep
from scratch_ddp.course.plots.style import rank_color

matplotlib.use("Agg")
SLOW = Sweep(buckets={1: 1.7, 10: 1.5, 100: 1.6}, per_parameter=1.8, flat=2.0, compute=0.9, best=(10, 1.5))
QUICK = Sweep(buckets={1: 1.1, 10: 1.1, 100: 1.2}, per_parameter=1.1, flat=1.4, compute=0.9, best=(1, 1.1))


@pytest.fixture
def drawn():
    """Returns a function that draws and gives the panel."""
    yield lambda *args: bucket_sweep(*args).axes[0]
    plt.close("all")


def points(panel, marker):
    return [(*line.get_xdata(), *line.get_ydata()) for line in panel.lines if line.get_marker() == marker]


def test_a_line_for_each_forecast_with_its_best_size_marked(drawn):
    panel = drawn({"64 ranks": SLOW, "2 ranks": QUICK})
    lines = {line.get_label(): line for line in panel.lines}
    assert list(lines["forecast: 64 ranks"].get_ydata()) == [1.7, 1.5, 1.6]
    assert list(lines["forecast: 2 ranks"].get_xdata()) == [1, 10, 100]
    assert lines["forecast: 2 ranks"].get_color() == rank_color(1)
    assert points(panel, "*") == [(10, 1.5), (1, 1.1)]
    assert points(panel, "o") == []


def test_the_two_ends_stand_beside_the_sizes(drawn):
    panel = drawn({"64 ranks": SLOW})
    marks = [line for line in panel.lines if line.get_linewidth() > 3]
    (left, alone), (right, whole) = [(list(mark.get_xdata()), list(mark.get_ydata())) for mark in marks]
    assert alone == [1.8, 1.8] and max(left) < 1
    assert whole == [2.0, 2.0] and min(right) > 100
    low, high = panel.get_xlim()
    assert low < min(left) and max(right) < high


def test_measured_steps_are_dots_in_the_colour_of_their_line(drawn):
    panel = drawn({"64 ranks": SLOW, "2 ranks": QUICK}, {"2 ranks": {1: 1.15, 100: 1.25}})
    assert points(panel, "o") == [(1, 1.15), (100, 1.25)]
    assert {line.get_color() for line in panel.lines if line.get_marker() == "o"} == {rank_color(1)}
    low, high = panel.get_ylim()
    assert low < 0.9 and high > 2.0


def test_dots_without_a_line_are_refused(drawn):
    with pytest.raises(ValueError, match="'3 ranks' was measured, but there is no forecast of it"):
        drawn({"64 ranks": SLOW}, {"3 ranks": {1: 1.0}})
