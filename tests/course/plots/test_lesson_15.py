"""The pictures of lesson 15: what they show is what they were given."""

import matplotlib.pyplot as plt
import pytest

from scratch_ddp.course.plots import bound_map, bound_sliders, forecast_curve, forecast_diagonal, memory_bars
from scratch_ddp.instruments.cost import BOUNDS, RankMemory


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


def texts(figure):
    return [text.get_text().strip() for panel in figure.axes for text in panel.texts]


def test_bars_end_at_the_total_and_say_it():
    memories = {"small": RankMemory(1e9, 1e9, 0, 2e9, 0, 0.5e9, 0), "large": RankMemory(9e9, 0, 0, 0, 0, 0, 0)}
    figure = memory_bars(memories, 5e9)
    ends = {round(bar.get_x() + bar.get_width(), 3) for bar in figure.axes[0].patches}
    assert {4.5, 9.0} <= ends and {"4.5 GB", "9 GB", "room"} <= set(texts(figure))
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["weights", "gradients", "optimizer", "activations"]  # no part that nobody holds


def test_the_map_asks_for_every_place():
    asked = []

    def binds(devices, batch):
        asked.append((devices, batch))
        return BOUNDS[len(asked) % len(BOUNDS)]

    figure = bound_map({"one": binds}, [1, 2], [4, 8, 16], 512)
    assert sorted(asked) == [(n, batch) for n in (1, 2) for batch in (4, 8, 16)]
    grid = figure.axes[0].images[0].get_array()
    assert grid.shape == (3, 2) and grid[0, 0] == 1 and grid[2, 1] == 6 % len(BOUNDS)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["2 Ki", "8 Ki"]


def test_without_jupyterlab_there_is_a_picture(monkeypatch):
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    assert len(bound_sliders().axes) == 1


def test_in_jupyterlab_there_are_sliders(monkeypatch):
    ipywidgets = pytest.importorskip("ipywidgets")
    shown = {}
    monkeypatch.setattr(ipywidgets, "interact", lambda function, **controls: shown.update(controls))
    monkeypatch.setenv("JPY_SESSION_NAME", "15_accounting.ipynb")
    assert bound_sliders() is None
    assert list(shown) == ["model", "cluster", "tp", "checkpointing"] and "XXL" in shown["model"]


def test_dots_stand_where_they_were_measured():
    figure = forecast_curve([1, 2, 4], [0.2, 0.2, 0.4], {1: 0.21, 4: 0.44}, 2, 0.1)
    dots = figure.axes[0].lines[1]
    assert list(dots.get_xdata()) == [1, 4] and list(dots.get_ydata()) == pytest.approx([210, 110])
    figure = forecast_diagonal({"a": 0.1, "b": 0.05}, {"a": 0.2, "b": 0.06})
    found = [(*line.get_xdata(), *line.get_ydata(), line.get_label()) for line in figure.axes[0].lines[1:]]
    assert found == [(50, 60, "b"), (100, 200, "a")]
