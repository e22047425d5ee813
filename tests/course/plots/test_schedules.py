"""The picture has a bar for each action, where and as long as it was."""

import matplotlib.pyplot as plt
import pytest
from matplotlib.patches import Rectangle

from scratch_ddp.course.plots import schedule_chart
from scratch_ddp.pipeline import gpipe, interleaved, simulate, zb_h1


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def bars(panel) -> list[tuple[float, float, int]]:
    """(left, width, row) of each."""
    found = [each for each in panel.patches if isinstance(each, Rectangle)]
    return sorted((each.get_x(), each.get_width(), round(each.get_y() + each.get_height() / 2)) for each in found)


def expected(spans, scale: float = 1.0) -> list[tuple[float, float, int]]:
    return sorted((scale * s, scale * (e - s), rank) for rank, row in enumerate(spans) for _, s, e in row)


def test_a_bar_for_each_action():
    panels = {"GPipe": simulate(gpipe(4, 8)), "ZB-H1": simulate(zb_h1(4, 8))}
    figure = schedule_chart(panels)
    for panel, (title, spans) in zip(figure.axes, panels.items(), strict=True):
        assert bars(panel) == expected(spans)
        assert panel.get_title(loc="left").startswith(title)
        assert [text.get_text() for text in panel.texts].count("7") == sum(
            a.micro == 7 for row in spans for a, *_ in row
        )
    assert figure.axes[0].get_title(loc="left") == "GPipe: bubble 27.3%"
    assert figure.axes[0].get_xlim() == (0, 33)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["forward", "backward", "backward: input", "backward: weights"]


def test_what_ran_begins_at_zero_and_laps_have_shades():
    spans = simulate(interleaved(2, 2, 2))
    later = [[(action, 5 + start, 5 + end) for action, start, end in row] for row in spans]
    panel = schedule_chart({"ran": later}, unit=0.5).axes[0]
    assert bars(panel) == expected(spans, 2.0)
    assert len({each.get_facecolor() for each in panel.patches}) == 4  # two kinds, two laps
