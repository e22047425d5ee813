"""The pictures of lesson 14b."""

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch

from scratch_ddp.course.plots import attention_map, expert_load, ways_on_links
from scratch_ddp.course.plots.style import rank_color

matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


def test_a_score_has_the_colour_of_the_rank_that_computed_it():
    first, second = torch.zeros(8, 8, dtype=torch.bool), torch.zeros(8, 8, dtype=torch.bool)
    first[0, 0], second[4, :3] = True, True
    panel = attention_map({"one": [first, second]}).axes[0]
    picture = torch.tensor(panel.images[0].get_array())
    colors = [torch.tensor(matplotlib.colors.to_rgb(rank_color(rank)), dtype=picture.dtype) for rank in (0, 1)]
    assert picture[0, 0].allclose(colors[0]) and picture[4, 2].allclose(colors[1]) and picture[4, 3].eq(1).all()
    assert [text.get_text() for text in panel.texts] == ["rank 0", "1", "rank 1", "3"]


def test_an_expert_has_a_column_of_what_each_rank_sent():
    table = torch.tensor([[1, 2, 0, 0], [3, 0, 0, 2]])
    panel = expert_load({"text": table}).axes[0]
    assert [[bar.get_height() for bar in bars] for bars in panel.containers] == table.tolist()
    assert [bar.get_y() for bar in panel.containers[1]] == [1, 2, 0, 0]
    assert [text.get_text() for text in panel.texts] == ["4", "2", "0", "2", "rank 0", "rank 1"]
    assert panel.lines[0].get_ydata()[0] == 2  # an equal share


def test_ways_measured_and_forecast():
    forecast = {"quick": {"DP": 10.0, "TP": 12.5}, "slow": {"DP": 160.0, "TP": 250.0}}
    measured = {"quick": {"DP": 16.0, "TP": 20.0}, "slow": {"DP": 200.0, "TP": 400.0}}
    panel = ways_on_links(measured, forecast, alone=20.0).axes[0]
    assert [[bar.get_height() for bar in bars] for bars in panel.containers] == [[1.25, 0.1], [1.0, 0.05]]
    assert [text.get_text() for text in panel.texts] == ["1.25", "0.10", "1.00", "0.05"]
    marks = [line.get_ydata()[0] for line in panel.lines if len(line.get_xdata()) == 2 and line.get_color() == "black"]
    assert marks == [2.0, 0.125, 1.6, 0.08]
