"""The picture of what ranks hold over time: peaks, the limit, what is beyond it."""

import matplotlib

matplotlib.use("Agg")

import pytest
from matplotlib import pyplot as plt

from scratch_ddp.course.plots import memory_curves
from scratch_ddp.course.plots.style import SENT_COLOR

CURVES = {"DDP": [(0.0, 0), (0.1, 40_000_000), (0.2, 90_000_000), (0.5, 0)], "FSDP": [(0.0, 0), (2.0, 50_000_000)]}


@pytest.fixture
def figure():
    figure = memory_curves(CURVES, limit=60_000_000, ends={"DDP": [0.1, 0.5]})
    yield figure
    plt.close(figure)


def test_each_panel_has_its_name_its_peak_and_the_limit(figure):
    titles = [panel.get_title(loc="left") for panel in figure.axes]
    assert titles == ["DDP", "FSDP"]
    assert [panel.texts[0].get_text() for panel in figure.axes] == ["90 MB", "50 MB"]
    assert len({panel.get_ylim() for panel in figure.axes}) == 1
    for panel in figure.axes:
        assert any(set(line.get_ydata()) == {60.0} for line in panel.get_lines())


def test_red_is_what_is_beyond_the_limit(figure):
    def red_height(panel) -> float:
        (red,) = (c for c in panel.collections if c.get_facecolor()[0, :3] == pytest.approx(_rgb(SENT_COLOR)))
        return max(y for path in red.get_paths() for _, y in path.vertices)

    assert [red_height(panel) for panel in figure.axes] == [90.0, 60.0]  # up to the peak; nothing


def _rgb(color: str) -> tuple[float, ...]:
    return matplotlib.colors.to_rgb(color)


def test_without_a_limit():
    figure = memory_curves(CURVES)
    assert figure.axes[0].get_ylim()[1] == pytest.approx(90 * 1.12)
    plt.close(figure)
