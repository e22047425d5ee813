"""The picture has a square for each element, in the colour of the rank that it belongs to."""

from collections import Counter

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_hex

from scratch_ddp.course.plots import memory_strips
from scratch_ddp.course.plots.style import QUIET, SENT_COLOR, SUM_COLOR, rank_color
from scratch_ddp.instruments.memory.ledger import Held, Moment

OWN, BORROWED = Held("w1", "own", 8), Held("W1", "borrowed", 16)
MOMENTS = [
    Moment("gather", (OWN, BORROWED), 12, 24),
    Moment("gradient", (OWN, BORROWED, Held("G", "partial", 16), Held("h", "activations", 12)), 0, 52),
    Moment("free", (OWN, Held("g1", "summed", 4)), 12, 12),
]


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def squares(figure) -> Counter:
    """How many there are of each colour: of their face, or of their frame where they have one."""
    drawn = [patch for patch in figure.axes[0].patches if patch.get_width() == 0.84]
    return Counter(to_hex(patch.get_edgecolor() if patch.get_linewidth() else patch.get_facecolor()) for patch in drawn)


def texts(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def test_a_square_for_each_weight_of_each_rank():
    figure = memory_strips({"rank 0": MOMENTS, "rank 1": MOMENTS}, line=(32, "the model"))
    rows = 2 * 2 * 4  # of each rank: two strips, two moments with a whole matrix, four elements a row
    assert squares(figure) == {
        rank_color(0): rows + 3 * 8,  # and its own, in three moments
        rank_color(1): rows + 3 * 8,
        rank_color(2): rows,
        rank_color(3): rows,
    }
    assert texts(figure).count("sends 24, holds at most 24 weights") == 2 and "the model" in texts(figure)


def test_all_kinds_of_one_rank():
    kinds = ("own", "borrowed", "partial", "summed", "activations")
    figure = memory_strips({"rank 2": MOMENTS}, kinds=kinds, rank=2, parts={"forward": 1, "backward": 2})
    found = squares(figure)
    assert found[rank_color(2)] == 3 * 8 + 2 * 4 + 16  # own, its row of W1 twice, the frames of G
    assert (found[SUM_COLOR], found[QUIET]) == (4, 12)
    assert {*kinds, "forward", "backward", "gather", "gradient", "free"} <= set(texts(figure))
    assert "sends 24, holds at most 24 weights, 52 numbers in all" in texts(figure)


def test_what_is_sent_stands_in_red():
    figure = memory_strips({"rank 0": MOMENTS})
    red = [text.get_text() for text in figure.axes[0].texts if to_hex(text.get_color()) == SENT_COLOR]
    assert red == ["sends", "12", "12"]
