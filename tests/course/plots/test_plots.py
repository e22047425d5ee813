"""Every picture shows the numbers that it was given, one test for each kind."""

from collections import Counter

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.colors import to_hex

from scratch_ddp.course import plots
from scratch_ddp.course.plots.style import QUIET, SENT_COLOR, SUM_COLOR, rank_color
from scratch_ddp.instruments.bandwidth import AlphaBeta, Results, Row
from scratch_ddp.instruments.cost import BOUNDS, RankMemory
from scratch_ddp.instruments.memory import Held, Moment
from scratch_ddp.instruments.timeline import Span, Timeline
from scratch_ddp.instruments.timing import Spread
from scratch_ddp.instruments.traffic import Message
from scratch_ddp.pipeline import gpipe, interleaved, simulate

BLUE, ORANGE = rank_color(0), rank_color(1)


@pytest.fixture(autouse=True)
def _closed_figures():
    yield
    plt.close("all")


def texts(panel) -> list[str]:
    return [text.get_text().strip() for text in panel.texts if text.get_text()]


def titles(figure) -> list[str]:
    return [panel.get_title(loc="left") for panel in figure.axes]


def legend(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].texts]


def points(lines) -> list[list[tuple[float, float]]]:
    return [[(float(x), float(y)) for x, y in zip(*line.get_data(), strict=True)] for line in lines]


def faces(panel) -> Counter:
    return Counter(to_hex(patch.get_facecolor()) for patch in panel.patches)


def test_holdings_are_in_the_colour_of_the_rank_they_came_from():
    panel = plots.holdings_atlas({"reduce": [([1], [12]), ([11], ["?"])], "other": [([1], [30])] * 2}).axes[0]
    assert Counter(texts(panel)) == Counter(["rank 0", "rank 1", "1", "11", "12", "?"])
    assert faces(panel) == {BLUE: 1, ORANGE: 2, "#dddddd": 1, "#ffffff": 4}
    assert faces(panel.figure.axes[1])[SUM_COLOR] == 2


def test_ring_frames_show_who_contributed_what_arrived_and_what_was_sent():
    walk = [[plots.Frame([1, 1]), plots.Frame([1, 11], [1], 8)], [plots.Frame([10, 10]), plots.Frame([11, 10], [0, 1])]]
    start, step = plots.ring_frames({"ring": walk}, tensor_bytes=8).axes
    assert faces(start) == {"#f4f4f4": 4, BLUE: 2, ORANGE: 2, SENT_COLOR: 1}
    assert faces(step)[SUM_COLOR] == 2 and faces(step)[BLUE] == faces(step)[ORANGE] == 1
    red = [(*each.get_xy(), each.get_width()) for each in step.patches if to_hex(each.get_edgecolor()) == SENT_COLOR]
    assert red == [(1.03, 0.03, 0.94), (0.03, 1.03, 1.94)] and texts(step) == ["1.00·S sent"]


def test_a_memory_strip_has_a_square_for_each_element():
    own, borrowed = Held("w1", "own", 8), Held("W1", "borrowed", 16)
    gradient, outputs = Held("G", "partial", 16), Held("h", "activations", 12)
    there, back = Moment("gather", (own, borrowed), 12, 24), Moment("backward", (own, gradient, outputs), 0, 36)
    moments = [there, back, Moment("free", (own, Held("g1", "summed", 4)), 12, 12)]
    kinds = ("own", "borrowed", "partial", "summed", "activations")
    (panel,) = plots.memory_strips({"r": moments}, 2, {"there": 1, "back": 2}, kinds, line=(32, "the model")).axes
    others, mine = {BLUE: 4, ORANGE: 4, rank_color(3): 4}, 3 * 8 + 4  # three times its own, and its row of W1
    assert faces(panel) == others | {rank_color(2): mine, "#ffffff": 16, SUM_COLOR: 4, QUIET: 12}
    assert {*kinds, "there", "back", "gather", "backward", "free", "the model"} <= set(texts(panel))
    assert "sends 24, holds at most 24 weights, 36 numbers in all" in texts(panel)
    assert [text.get_text() for text in panel.texts if text.get_color() == SENT_COLOR] == ["sends", "12", "", "12"]


def test_a_score_has_the_colour_of_the_rank_that_computed_it():
    first, second = torch.zeros(8, 8, dtype=torch.bool), torch.zeros(8, 8, dtype=torch.bool)
    first[0, 0], second[4, :3] = True, True
    panel = plots.attention_map({"one": [first, second]}).axes[0]
    colors = [to_hex(panel.images[0].get_array()[place]) for place in ((0, 0), (4, 2), (4, 3))]
    assert colors == [BLUE, ORANGE, "#ffffff"]
    assert texts(panel) == ["rank 0", "1", "rank 1", "3"]


def test_arrows_point_downhill_and_the_chain_ends_at_the_mean():
    start = torch.tensor([1.0, 2.0], requires_grad=True)
    gradients = [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 3.0])]
    figure = plots.gradient_arrows(lambda w: (w**2).sum() + 1, start, gradients, torch.tensor([0.5, 1.5]))
    arrows = [[(*a.XY[0], a.U[0], a.V[0]) for a in panel.collections if hasattr(a, "XY")] for panel in figure.axes]
    mean = (1, 2, -0.5, -1.5)  # from where, and how far
    assert arrows == [[mean, (1, 2, -1, 0), (1, 2, 0, -3), mean], [mean, (1, 2, -0.5, 0), (0.5, 2, 0, -1.5)]]


def test_a_ladder_has_an_arrow_for_each_message_and_shows_who_knows():
    log = [Message(1, 0, 1), Message(1, 1, 2), Message(2, 1, 3)]
    (panel,) = plots.message_ladder({"tree": log}, n=4, source=0, parts={"first": 1, "second": 1}).axes
    arrows = [(note.xyann, note.xy) for note in panel.texts if hasattr(note, "arrow_patch")]
    assert arrows == [(pytest.approx((m.round - 0.92, m.sender)), (m.round, m.receiver)) for m in log]
    known = {int(y): x for (x, y), _ in points(line for line in panel.lines if line.get_linewidth() == 4)}
    assert known == {0: 0, 1: 1, 3: 2} and texts(panel) == ["first", "second"]


def test_a_timeline_shows_what_of_the_communication_is_exposed():
    mine = Timeline(compute=[Span("backward", 5.0, 5.02)], communication=[Span("all_reduce", 5.01, 5.05)])
    figure = plots.timeline_chart({"a step": [mine]})
    assert titles(figure) == ["a step"] and legend(figure) == ["backward", "communication, hidden", "exposed"]
    bars = [each for each in figure.axes[0].collections if len(each.get_facecolor())]
    spans = {(to_hex(bar.get_facecolor()[0]), *bar.get_paths()[0].get_extents().intervalx.round()) for bar in bars}
    assert spans == {("#4e79a7", 0, 20), ("#f2b5b5", 10, 50), (SENT_COLOR, 20, 50)}


def test_a_schedule_has_a_bar_for_each_action_and_shades_for_laps():
    panels = {"GPipe": simulate(gpipe(4, 8)), "laps": simulate(interleaved(2, 2, 2))}
    panels["laps"] = [[(action, 5 + start, 5 + end) for action, start, end in row] for row in panels["laps"]]
    figure = plots.schedule_chart(panels, unit=0.5)
    for panel, spans, zero in zip(figure.axes, panels.values(), (0, 5), strict=True):
        drawn = [(each.get_x(), each.get_width(), round(each.get_y() + 0.42)) for each in panel.patches]
        assert drawn == [(2 * (s - zero), 2 * (e - s), rank) for rank, row in enumerate(spans) for _, s, e in row]
    assert titles(figure)[0] == "GPipe: bubble 27.3%" and len(faces(figure.axes[1])) == 4  # two kinds, two laps


def test_a_saw_marks_steps_with_different_gradients():
    right = [("backward", 0.5), ("sync", 0.0), ("step", 0.0)]
    wrong = [("backward", 0.5), ("step", 0.5), ("backward", 0.25)]
    figure = plots.disagreement_saw({"right": right, "wrong": wrong})
    for panel, marker, place in zip(figure.axes, "oX", ((1, 0), (1, 0.5)), strict=True):
        assert points(line for line in panel.lines if line.get_marker() == marker) == [[place]]
    assert points(figure.axes[1].lines)[-2] == [(1, 0), (2, 0.25)]  # from zero again
    assert legend(figure) == ["a step, all ranks with the same gradient", "a step, each rank with its own"]


def test_times_of_collectives():
    seconds = {size: Spread(1e-4 + 1e-9 * size, 1e-5, 1.0) for size in (2**10, 2**16, 2**20)}
    found = Results(tuple(Row("gloo", 4, n, each, 5, 1) for n, each in seconds.items()))
    other = AlphaBeta(1e-5, 1e-8)
    figure = plots.time_chart(found, found.fits()[0], {"Ethernet": other})
    measured, fit, ethernet = points(figure.axes[0].lines)[0], *points(figure.axes[0].lines)[-3:-1]
    assert measured[1] == (2**16, pytest.approx(1e-4 + 1e-9 * 2**16))
    assert fit[-1][1] == pytest.approx(measured[-1][1]) and ethernet[-1][1] == pytest.approx(other.seconds(2**20))
    assert texts(figure.axes[0]) == ["Ethernet"] and legend(figure) == [*found.series(), "α + β·S"]


def test_the_map_asks_for_every_place():
    figure = plots.bound_map({"one": lambda n, batch: BOUNDS[(n + batch) % 5]}, [1, 2], [4, 8, 16], 512)
    colors = [patch.get_facecolor()[:3] for patch in figure.legends[0].get_patches()]  # in the order of BOUNDS
    for row, column, bound in ((0, 0, (1 + 4) % 5), (2, 1, (2 + 16) % 5)):
        assert tuple(figure.axes[0].images[0].get_array()[row, column]) == colors[bound]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["2 Ki", "8 Ki"]


SWEEP = plots.Sweep({1: 1.7, 10: 1.5}, per_parameter=1.8, flat=2.0, compute=0.9, best=(10, 1.5))


@pytest.mark.parametrize(
    ("figure", "lines"),
    [
        (lambda: plots.step_curves({"a": {"x": [1, 2], "y": [3, 4]}}, "loss"), [[(0, 1), (1, 2)], [(0, 3), (1, 4)]]),
        (lambda: plots.losses_and_residuals({"x": [2, 1]}, {"y": [0, 1e-8]}), [[(0, 2), (1, 1)], [(0, 0), (1, 1e-8)]]),
        (lambda: plots.bucket_sweep({"a": SWEEP}, {"a": {1: 1.75}}), [[(1, 1.7), (10, 1.5)], [(10, 1.5)], [(1, 1.75)]]),
    ],
)
def test_lines_and_dots_are_where_the_numbers_are(figure, lines):
    drawn = points(line for panel in figure().axes for line in panel.lines)
    assert [line for line in drawn if line in lines] == lines


X, W = torch.arange(8.0).view(2, 4), torch.arange(8.0).view(4, 2)
BY_COLUMNS = [X @ part for part in W.chunk(2, dim=1)]
BY_ROWS = [a @ b for a, b in zip(X.chunk(2, dim=1), W.chunk(2, dim=0), strict=True)]
STATIONS = {"sequence": [plots.Station("norm", (8, 64), (16, 64)), plots.Station("up", (16, 64), (16, 128), ["call"])]}
HOSTS = plots.HostTraffic([(0, 1), (2, 3)], {(0, 1): 5.0, (0, 2): 0.5, (1, 3): 0.75, (3, 1): 2.0})
CURVES = {"DDP": [(0.0, 0), (0.2, 90_000_000), (0.5, 0)], "FSDP": [(0.0, 0), (2.0, 50_000_000)]}
MEMORIES = {"small": RankMemory(1e9, 1e9, 0, 2e9, 0, 0.5e9, 0), "large": RankMemory(9e9, 0, 0, 0, 0, 0, 0)}


@pytest.mark.parametrize(
    ("figure", "says"),
    [
        (lambda: plots.cut_products(X, W, BY_COLUMNS, BY_ROWS), {"all-gather", "all-reduce", "28", "34", "76", "98"}),
        (lambda: plots.slice_layouts(STATIONS, rank=1), {"sequence", "8 × 64", "call"}),
        (lambda: plots.host_traffic({"a ring": HOSTS}, "S"), {"2.00 S out of a host", "5.00", "0.50", "0.75"}),
        (lambda: plots.memory_curves(CURVES, limit=6e7, ends={"DDP": [0.1]}), {"90 MB", "50 MB", "the limit"}),
        (lambda: plots.memory_bars(MEMORIES, 5e9), {"4.5 GB", "9 GB", "room"}),
    ],
)
def test_a_picture_says_its_numbers(figure, says):
    assert says <= {text for panel in figure().axes for text in texts(panel)}
