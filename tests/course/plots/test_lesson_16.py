"""The pictures of lesson 16: what they show is what they were given."""

import matplotlib.pyplot as plt
import pytest

from scratch_ddp.course.plots import HostTraffic, attempts, host_traffic, resumed_losses, saving_curve, steps_over_time

LINES = [{"step": step, "loss": 1 / step, "ranks": 2, "time": 10.0 + step} for step in (1, 2, 3)]
LINES += [{"step": step, "loss": 1 / step, "ranks": 1, "time": 20.0 + step} for step in (2, 3, 4)]


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


def texts(panel):
    return [text.get_text().strip() for text in panel.texts]


def test_what_leaves_a_host_is_counted_on_the_busier_one():
    inside = HostTraffic([(0, 1), (2, 3)], {(0, 1): 5.0, (1, 0): 2.0})
    across = HostTraffic([(0, 1), (2, 3)], {(0, 2): 0.5, (1, 3): 0.75, (3, 1): 2.0})
    first, second = host_traffic({"inside": inside, "across": across}, "S").axes
    assert inside.out_of_a_host == 0 and across.out_of_a_host == 2
    assert "0.00 S out of a host" in texts(first) and "2.00 S out of a host" in texts(second)
    assert {"0.50", "0.75", "2.00"} <= set(texts(second)) and first.get_title() == "inside"


def test_a_log_is_cut_where_steps_are_repeated():
    assert [[line["step"] for line in part] for part in attempts(LINES)] == [[1, 2, 3], [2, 3, 4]]
    panel = steps_over_time(LINES, {"rank": 13.5}).axes[0]
    assert [list(line.get_xdata()) for line in panel.lines[:2]] == [[0, 1, 2], [11, 12, 13]]
    assert list(panel.lines[2].get_xdata()) == [2.5, 2.5] and "rank killed" in texts(panel)


def test_the_resumed_curve_has_each_step_once():
    plain, resumed = resumed_losses(LINES, [1.0, 0.5, 1 / 3, 0.25]).axes[0].lines
    assert list(plain.get_xdata()) == list(resumed.get_xdata()) == [1, 2, 3, 4]
    assert list(resumed.get_ydata()) == [1.0, 0.5, 1 / 3, 0.25]


def test_the_saving_curve_is_in_percent():
    curve, young = saving_curve({5: 0.5, 50: 0.1, 500: 0.25}, young=49).axes[0].lines
    assert list(curve.get_xdata()) == [5, 50, 500] and list(curve.get_ydata()) == [50, 10, 25]
    assert young.get_xdata()[0] == 49
