"""The pictures have a square for each number, and show of each layer's output the part that the rank holds."""

from collections import Counter

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.colors import to_hex

from scratch_ddp.course.plots import Station, cut_products, slice_layouts
from scratch_ddp.course.plots.style import QUIET, SUM_COLOR, rank_color

X, W = torch.arange(8.0).view(2, 4), torch.arange(8.0).view(4, 2)


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def texts(panel) -> list[str]:
    return [text.get_text() for text in panel.texts]


def faces(panel) -> Counter:
    return Counter(to_hex(patch.get_facecolor()) for patch in panel.patches)


def test_both_products_with_their_numbers():
    by_columns = [X @ part for part in W.chunk(2, dim=1)]
    by_rows = [x @ w for x, w in zip(X.chunk(2, dim=1), W.chunk(2, dim=0), strict=True)]
    above, below = cut_products(X, W, by_columns, by_rows).axes
    blue, orange = rank_color(0), rank_color(1)
    assert faces(above) == {QUIET: 8, blue: 4 + 2 + 2, orange: 4 + 2 + 2}
    assert faces(below) == {blue: 4 + 4, orange: 4 + 4, "#ffffff": 2 * 4, SUM_COLOR: 4}
    assert "all-gather" in texts(above) and "all-reduce" in texts(below)
    for panel in (above, below):
        numbers = [each for each in texts(panel) if each.isdigit()]
        assert numbers[-4:] == [f"{number:g}" for number in (X @ W).flatten()]  # Y is drawn last


def test_the_part_that_a_rank_holds():
    strip = [Station("norm", (8, 64), (16, 64)), Station("up", (16, 64), (16, 128), ["all_gather"])]
    (panel,) = slice_layouts({"sequence": strip}, rank=1, n=2).axes
    whole_norm, norm, whole_up, up = panel.patches[:4]
    assert norm.get_height() == whole_norm.get_height() / 2 == norm.get_y() and norm.get_x() == whole_norm.get_x()
    assert up.get_width() == whole_up.get_width() / 2 == up.get_x() - whole_up.get_x() and up.get_y() == 0
    assert whole_up.get_width() == 2 * whole_norm.get_width()
    assert {"sequence", "8 × 64", "all-gather"} <= set(texts(panel))
