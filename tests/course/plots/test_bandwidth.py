"""Charts of times and bandwidths show the rows that they are given."""

import matplotlib.pyplot as plt
import pytest

from scratch_ddp.course.plots import bandwidth_chart, time_chart
from scratch_ddp.instruments.bandwidth.alpha_beta import AlphaBeta
from scratch_ddp.instruments.bandwidth.results import Results, Row
from scratch_ddp.instruments.timing import Spread

SIZES = (2**10, 2**16, 2**20)


def rows(operation="all_reduce", ranks=2):
    for size in SIZES:
        seconds = 1e-4 + 1e-9 * size
        yield Row(operation, "gloo", "cpu", ranks, size, size, Spread(seconds, seconds / 2, seconds * 2), 5, 1)


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def test_times_with_quartiles_fits_and_other_networks():
    found = Results((*rows(), *rows(ranks=4)))
    other = AlphaBeta(1e-5, 1e-8)
    figure = time_chart(found, found.fits()[0], {"Ethernet": other})
    (panel,) = figure.axes
    lines = [line for line in panel.lines if len(line.get_xdata()) == len(SIZES)]
    medians = [
        line
        for line in lines
        if line.get_linestyle() == "-" and line.get_ydata()[0] == pytest.approx(1.01024e-4, rel=1e-3)
    ]
    assert len(medians) == 2
    drawn = [line for line in panel.lines if len(line.get_xdata()) > len(SIZES)]
    assert len(drawn) == 3 and drawn[-1].get_ydata()[-1] == pytest.approx(other.seconds(SIZES[-1]))
    assert [text.get_text() for text in panel.texts] == ["Ethernet"]
    assert [text.get_text() for text in figure.legends[0].texts] == [*found.series(), "α + β·S"]


def test_three_bandwidths_on_one_scale():
    found = Results(tuple(rows(ranks=4)))
    figure = bandwidth_chart(found)
    assert [panel.get_title(loc="left") for panel in figure.axes] == [
        "algbw: S/t", "busbw: 2(n−1)/n · S/t", "as published: 2 · S/t"
    ]  # fmt: skip
    algorithm, bus, published = (panel.lines[0].get_ydata()[-1] for panel in figure.axes)
    assert bus == pytest.approx(1.5 * algorithm) and published == pytest.approx(2 * algorithm)
    assert len({panel.get_ylim() for panel in figure.axes}) == 1 and figure.axes[0].get_ylim()[1] > published


def test_other_operations_have_other_factors_and_no_published_figure():
    figure = bandwidth_chart(Results(tuple(rows("broadcast"))))
    assert [panel.get_title(loc="left") for panel in figure.axes] == ["algbw: S/t", "busbw: factor · S/t"]
    with pytest.raises(ValueError, match="no bandwidth is called 'bandwidth'; there are algbw, busbw, published"):
        bandwidth_chart(Results(tuple(rows())), ["bandwidth"])
