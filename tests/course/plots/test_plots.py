"""Every picture shows the numbers that it was given, one test for each kind; and JupyterLab gets sliders."""

from collections import Counter

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.colors import to_hex, to_rgb

from scratch_ddp.course import plots
from scratch_ddp.course.plots.style import QUIET, SENT_COLOR, SUM_COLOR, rank_color
from scratch_ddp.instruments.bandwidth import AlphaBeta
from scratch_ddp.instruments.bandwidth.results import Results, Row
from scratch_ddp.instruments.cost import BOUNDS, RankMemory
from scratch_ddp.instruments.memory import Held, Moment
from scratch_ddp.instruments.timeline import Breakdown, Span, Timeline
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


def legend(drawn) -> list[str]:
    return [text.get_text() for text in (drawn.legends[0] if hasattr(drawn, "legends") else drawn.get_legend()).texts]


def points(lines) -> list[list[tuple[float, float]]]:
    return [[(float(x), float(y)) for x, y in zip(*line.get_data(), strict=True)] for line in lines]


def faces(panel) -> Counter:
    return Counter(to_hex(patch.get_facecolor()) for patch in panel.patches)


# What ranks hold and compute


def test_holdings_are_in_the_colour_of_the_rank_they_came_from():
    panel = plots.holdings_atlas({"reduce": [([1], [12]), ([11], ["?"])], "other": [([1], [30])] * 2}).axes[0]
    assert Counter(texts(panel)) == Counter(["rank 0", "rank 1", "1", "11", "12", "?"])
    assert faces(panel) == {BLUE: 1, ORANGE: 2, "#dddddd": 1, "#ffffff": 4}
    assert faces(panel.figure.axes[1])[SUM_COLOR] == 2


def test_ring_frames_show_who_contributed_what_arrived_and_what_was_sent():
    walk = [[plots.Frame([1, 1]), plots.Frame([1, 11], [1], 8)], [plots.Frame([10, 10]), plots.Frame([11, 10], [0], 4)]]
    start, step = plots.ring_frames({"ring": walk}, tensor_bytes=8).axes
    assert [panel.get_title() for panel in (start, step)] == ["start", "step 1"]
    assert faces(start) == {"#f4f4f4": 4, BLUE: 2, ORANGE: 2, SENT_COLOR: 1}
    assert faces(step)[SUM_COLOR] == 2 and faces(step)[BLUE] == faces(step)[ORANGE] == 1
    red = [patch.get_xy() for patch in step.patches if to_hex(patch.get_edgecolor()) == SENT_COLOR]
    assert red == [(1.03, 0.03), (0.03, 1.03)] and texts(step) == ["1.00·S sent"]


def test_both_products_with_their_numbers():
    x, w = torch.arange(8.0).view(2, 4), torch.arange(8.0).view(4, 2)
    by_columns = [x @ part for part in w.chunk(2, dim=1)]
    by_rows = [a @ b for a, b in zip(x.chunk(2, dim=1), w.chunk(2, dim=0), strict=True)]
    above, below = plots.cut_products(x, w, by_columns, by_rows).axes
    assert faces(above) == {QUIET: 8, BLUE: 4 + 2 + 2, ORANGE: 4 + 2 + 2}
    assert faces(below) == {BLUE: 4 + 4, ORANGE: 4 + 4, "#ffffff": 2 * 4, SUM_COLOR: 4}
    for panel, call in ((above, "all-gather"), (below, "all-reduce")):
        numbers = [text for text in texts(panel) if text.isdigit()]
        assert call in texts(panel) and numbers[-4:] == [f"{number:g}" for number in (x @ w).flatten()]  # Y is last


def test_the_part_of_an_output_that_a_rank_holds():
    up = plots.Station("up", (16, 64), (16, 128), ["all_gather"])
    (panel,) = plots.slice_layouts({"sequence": [plots.Station("norm", (8, 64), (16, 64)), up]}, rank=1).axes
    whole_norm, norm, whole_up, up = panel.patches[:4]
    assert norm.get_height() == whole_norm.get_height() / 2 == norm.get_y() and norm.get_x() == whole_norm.get_x()
    assert up.get_width() == whole_up.get_width() / 2 == up.get_x() - whole_up.get_x() and up.get_y() == 0
    assert {"sequence", "8 × 64", "all-gather"} <= set(texts(panel))


def test_a_memory_strip_has_a_square_for_each_element():
    own, borrowed = Held("w1", "own", 8), Held("W1", "borrowed", 16)
    gradient, outputs = Held("G", "partial", 16), Held("h", "activations", 12)
    moments = [Moment("gather", (own, borrowed), 12, 24), Moment("backward", (own, gradient, outputs), 0, 36)]
    moments.append(Moment("free", (own, Held("g1", "summed", 4)), 12, 12))
    kinds = ("own", "borrowed", "partial", "summed", "activations")
    figure = plots.memory_strips({"a rank": moments}, 2, {"there": 1, "back": 2}, kinds, line=(32, "the model"))
    (panel,) = figure.axes
    edges = Counter(to_hex(patch.get_edgecolor()) for patch in panel.patches if patch.get_linewidth())
    assert edges == {rank_color(2): 16}  # the frames of G
    # three times its own, and its row of W1
    rows = {BLUE: 4, ORANGE: 4, rank_color(3): 4}
    assert faces(panel) == rows | {rank_color(2): 3 * 8 + 4, "#ffffff": 16, SUM_COLOR: 4, QUIET: 12}
    assert {*kinds, "there", "back", "gather", "backward", "free", "the model"} <= set(texts(panel))
    assert "sends 24, holds at most 24 weights, 36 numbers in all" in texts(panel)
    assert [text.get_text() for text in panel.texts if text.get_color() == SENT_COLOR] == ["sends", "12", "", "12"]


def test_a_score_has_the_colour_of_the_rank_that_computed_it():
    first, second = torch.zeros(8, 8, dtype=torch.bool), torch.zeros(8, 8, dtype=torch.bool)
    first[0, 0], second[4, :3] = True, True
    panel = plots.attention_map({"one": [first, second]}).axes[0]
    picture = torch.tensor(panel.images[0].get_array())
    colors = [torch.tensor(to_rgb(color), dtype=picture.dtype) for color in (BLUE, ORANGE)]
    assert picture[0, 0].allclose(colors[0]) and picture[4, 2].allclose(colors[1]) and picture[4, 3].eq(1).all()
    assert texts(panel) == ["rank 0", "1", "rank 1", "3"]


def test_arrows_point_downhill_and_the_chain_ends_at_the_mean():
    start = torch.tensor([1.0, 2.0], requires_grad=True)
    gradients = [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 3.0])]
    figure = plots.gradient_arrows(lambda w: (w**2).sum() + 1, start, gradients, torch.tensor([0.5, 1.5]))
    arrows = [
        [(*each.XY[0], each.U[0], each.V[0]) for each in panel.collections if hasattr(each, "XY")]
        for panel in figure.axes
    ]
    assert arrows[0] == [(1, 2, -0.5, -1.5), (1, 2, -1, 0), (1, 2, 0, -3), (1, 2, -0.5, -1.5)]
    assert arrows[1] == [(1, 2, -0.5, -1.5), (1, 2, -0.5, 0), (0.5, 2, 0, -1.5)]


# Who sends what to whom


def test_a_ladder_has_an_arrow_for_each_message_and_shows_who_knows():
    log = [Message(1, 0, 1), Message(2, 0, 2), Message(2, 1, 3)]
    (panel,) = plots.message_ladder({"tree": log}, n=4, source=0, parts={"first": 1, "second": 1}).axes
    arrows = (
        [(text.xyann, text.xy) for text in panel.texts if text.arrow_patch]
        if False
        else [(note.xyann, note.xy) for note in panel.texts if getattr(note, "arrow_patch", None)]
    )
    assert arrows == [(pytest.approx((m.round - 0.92, m.sender)), (m.round, m.receiver)) for m in log]
    known = {int(y): x for (x, y), _ in points(line for line in panel.lines if line.get_linewidth() == 4)}
    assert known == {0: 0, 1: 1, 2: 2, 3: 2} and texts(panel) == ["first", "second"]


def test_what_leaves_a_host_is_counted_on_the_busier_one():
    inside = plots.HostTraffic([(0, 1), (2, 3)], {(0, 1): 5.0, (1, 0): 2.0})
    across = plots.HostTraffic([(0, 1), (2, 3)], {(0, 2): 0.5, (1, 3): 0.75, (3, 1): 2.0})
    first, second = plots.host_traffic({"inside": inside, "across": across}, "S").axes
    assert "0.00 S out of a host" in texts(first) and "2.00 S out of a host" in texts(second)
    assert {"0.50", "0.75", "2.00"} <= set(texts(second)) and titles(first.figure) == ["inside", "across"]


def test_an_expert_has_a_column_of_what_each_rank_sent():
    table = torch.tensor([[1, 2, 0, 0], [3, 0, 0, 2]])
    panel = plots.expert_load({"text": table}).axes[0]
    assert [[bar.get_height() for bar in bars] for bars in panel.containers] == table.tolist()
    assert [bar.get_y() for bar in panel.containers[1]] == [1, 2, 0, 0]
    assert texts(panel) == ["rank 0", "rank 1", "4", "2", "0", "2"]
    assert panel.lines[0].get_ydata()[0] == 2  # an equal share


# What ranks did over time


def bars(panel) -> dict[str, list[tuple[float, float]]]:
    """By colour, (left, width) of each in milliseconds."""
    found: dict[str, list[tuple[float, float]]] = {}
    for each in panel.collections:
        for path in each.get_paths() if len(each.get_facecolor()) else ():
            box = path.get_extents()
            found.setdefault(to_hex(each.get_facecolor()[0]), []).append((round(box.x0, 6), round(box.width, 6)))
    return found


def test_a_timeline_shows_what_of_the_communication_is_exposed():
    mine = Timeline(compute=[Span("backward", 5.0, 5.02)], communication=[Span("all_reduce", 5.01, 5.05)])
    figure = plots.timeline_chart({"a step": [mine, mine]})
    assert titles(figure) == ["a step"] and legend(figure) == ["backward", "communication, hidden", "exposed"]
    assert bars(figure.axes[0]) == {"#4e79a7": [(0, 20)] * 2, "#f2b5b5": [(10, 40)] * 2, SENT_COLOR: [(20, 30)] * 2}


def test_a_breakdown_has_the_parts_of_each_step():
    parts = {"backward": [(7.0, 7.02)], "waiting": [(7.02, 7.03)], "transfer": [(7.03, 7.07)]}
    parts |= {name: [] for name in ("forward", "optimizer", "other", "data", "idle")}
    figure = plots.breakdown_chart({"a step": [Breakdown(0, 7.0, 7.07, parts)]})
    assert legend(figure) == ["backward", "waiting", "transfer"]
    found = bars(figure.axes[0])
    assert (found["#4e79a7"], found["#e3e3e3"], found[SENT_COLOR]) == ([(0, 20)], [(20, 10)], [(30, 40)])


def test_a_schedule_has_a_bar_for_each_action_and_shades_for_laps():
    panels = {"GPipe": simulate(gpipe(4, 8)), "laps": simulate(interleaved(2, 2, 2))}
    panels["laps"] = [[(action, 5 + start, 5 + end) for action, start, end in row] for row in panels["laps"]]
    figure = plots.schedule_chart(panels, axis="seconds", unit=0.5)
    for panel, spans, zero in zip(figure.axes, panels.values(), (0, 5), strict=True):
        drawn = [(each.get_x(), each.get_width(), round(each.get_y() + 0.42)) for each in panel.patches]
        assert drawn == [(2 * (s - zero), 2 * (e - s), rank) for rank, row in enumerate(spans) for _, s, e in row]
    assert titles(figure)[0] == "GPipe: bubble 27.3%" and legend(figure) == ["forward", "backward"]
    assert len(faces(figure.axes[1])) == 4  # two kinds, two laps


# Lines over steps and seconds


def test_curves_losses_and_residuals():
    figure = plots.step_curves({"a": {"x": [1, 2], "y": [3, 4]}, "b": {"x": [5, 6]}}, "loss", limits=(0, 9))
    assert points(figure.axes[0].lines) == [[(0, 1), (1, 2)], [(0, 3), (1, 4)]] and titles(figure) == ["a", "b"]
    assert figure.axes[1].get_ylim() == (0, 9) and legend(figure.axes[0]) == ["x", "y"]
    above, below = plots.losses_and_residuals({"one": [2, 1], "two": [2, 1]}, {"two": [0, 1e-8]}).axes
    assert points(above.lines) == [[(0, 2), (1, 1)]] * 2 and points(below.lines) == [[(0, 0), (1, 1e-8)]]
    assert above.lines[1].get_color() == below.lines[0].get_color() == ORANGE


def test_a_saw_marks_steps_with_different_gradients():
    right = [("backward", 0.5), ("sync", 0.0), ("step", 0.0)]
    wrong = [("backward", 0.5), ("step", 0.5), ("backward", 0.25)]
    figure = plots.disagreement_saw({"right": right, "wrong": wrong})
    marks = [[(p, line.get_marker()) for p, line in zip(points(panel.lines), panel.lines, strict=True)
              if line.get_marker() != "None"] for panel in figure.axes]  # fmt: skip
    assert marks == [[([(1, 0)], "o")], [([(1, 0.5)], "X")]]
    assert points(figure.axes[1].lines)[-2] == [(1, 0), (2, 0.25)]  # from zero again
    assert legend(figure) == ["a step, all ranks with the same gradient", "a step, each rank with its own"]


def test_memory_beyond_the_limit_is_red():
    curves = {"DDP": [(0.0, 0), (0.2, 90_000_000), (0.5, 0)], "FSDP": [(0.0, 0), (2.0, 50_000_000)]}
    figure = plots.memory_curves(curves, limit=60_000_000, ends={"DDP": [0.1, 0.5]})
    assert [texts(panel) for panel in figure.axes] == [["90 MB"], ["50 MB", "the limit"]]
    for panel, top in zip(figure.axes, (90, 60), strict=True):
        red = [each for each in panel.collections if to_hex(each.get_facecolor()[0]) == SENT_COLOR]
        assert max(y for path in red[0].get_paths() for _, y in path.vertices) == top


def test_an_interrupted_run():
    lines = [{"step": step, "loss": 1 / step, "ranks": 2, "time": 10.0 + step} for step in (1, 2, 3)]
    lines += [{"step": step, "loss": 1 / step, "ranks": 1, "time": 20.0 + step} for step in (2, 3, 4)]
    assert [[line["step"] for line in part] for part in plots.attempts(lines)] == [[1, 2, 3], [2, 3, 4]]
    figure = plots.steps_over_time(lines, {"rank": 13.5})
    assert points(figure.axes[0].lines)[:2] == [[(0, 1), (1, 2), (2, 3)], [(11, 2), (12, 3), (13, 4)]]
    assert legend(figure) == ["2 ranks, steps 1 to 3", "1 rank, steps 2 to 4"]
    assert texts(figure.axes[0]) == ["rank killed"] and figure.axes[0].lines[2].get_xdata()[0] == 2.5
    plain, resumed = points(plots.resumed_losses(lines, [1.0, 0.5, 1 / 3, 0.25]).axes[0].lines)
    assert plain == resumed == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25)]
    curve, young = points(plots.saving_curve({5: 0.5, 50: 0.1, 500: 0.25}, young=49).axes[0].lines)
    assert curve == [(5, 50), (50, 10), (500, 25)] and young[0][0] == 49


# Seconds and bytes, forecast and measured


def results(operation: str, ranks: int = 4) -> Results:
    return Results(tuple(
        Row(operation, "gloo", "cpu", ranks, size, size, Spread(1e-4 + 1e-9 * size, 1e-5, 1.0), 5, 1)
        for size in (2**10, 2**16, 2**20)
    ))  # fmt: skip


def test_times_and_bandwidths_of_collectives():
    found, other = results("all_reduce"), AlphaBeta(1e-5, 1e-8)
    figure = plots.time_chart(found, found.fits()[0], {"Ethernet": other})
    measured, fit, ethernet = points(figure.axes[0].lines)[0], *points(figure.axes[0].lines)[-3:-1]
    assert measured[1] == (2**16, pytest.approx(1e-4 + 1e-9 * 2**16))
    assert fit[-1][1] == pytest.approx(measured[-1][1]) and ethernet[-1][1] == pytest.approx(other.seconds(2**20))
    assert texts(figure.axes[0]) == ["Ethernet"] and legend(figure) == [*found.series(), "α + β·S"]
    figure = plots.bandwidth_chart(found)
    assert titles(figure) == ["algbw: S/t", "busbw: 2(n−1)/n · S/t", "as published: 2 · S/t"]
    algorithm, bus, published = (points(panel.lines)[0][-1][1] for panel in figure.axes)
    assert (bus, published) == pytest.approx((1.5 * algorithm, 2 * algorithm))
    assert titles(plots.bandwidth_chart(results("broadcast"))) == ["algbw: S/t", "busbw: factor · S/t"]


def test_a_sweep_with_its_best_size_its_ends_and_what_was_measured():
    sweep = plots.Sweep({1: 1.7, 10: 1.5, 100: 1.6}, per_parameter=1.8, flat=2.0, compute=0.9, best=(10, 1.5))
    (panel,) = plots.bucket_sweep({"64 ranks": sweep}, {"64 ranks": {1: 1.75}}).axes
    line, best, dots, left, right = points(panel.lines)[:5]
    assert (line, best, dots) == ([(1, 1.7), (10, 1.5), (100, 1.6)], [(10, 1.5)], [(1, 1.75)])
    assert left[1][0] < 1 < 100 < right[0][0] and (left[0][1], right[0][1]) == (1.8, 2.0)


def test_forecasts_beside_measurements():
    (panel,) = plots.forecast_curve([1, 2, 4], [0.2, 0.2, 0.4], {1: 0.21, 4: 0.44}, 2, 0.1).axes
    assert points(panel.lines)[:2] == [[(1, 200), (2, 100), (4, 100)], [(1, 210), (4, 110)]]
    (panel,) = plots.forecast_diagonal({"a": 0.1, "b": 0.05}, {"a": 0.2, "b": 0.06}).axes
    assert points(panel.lines)[1:] == [[(50, 60)], [(100, 200)]] and legend(panel) == ["b", "a"]


def test_ways_on_links_are_times_as_fast_as_alone():
    forecast = {"quick": {"DP": 10.0, "TP": 12.5}, "slow": {"DP": 160.0, "TP": 250.0}}
    measured = {"quick": {"DP": 16.0, "TP": 20.0}, "slow": {"DP": 200.0, "TP": 400.0}}
    (panel,) = plots.ways_on_links(measured, forecast, alone=20.0).axes
    assert [[bar.get_height() for bar in bars] for bars in panel.containers] == [[1.25, 0.1], [1.0, 0.05]]
    assert texts(panel) == ["1.25", "0.10", "1.00", "0.05"]
    marks = [path.vertices[0][1] for each in panel.collections for path in each.get_paths()]
    assert marks == [2.0, 0.125, 1.6, 0.08]


def test_memory_bars_end_at_the_total_and_say_it():
    memories = {"small": RankMemory(1e9, 1e9, 0, 2e9, 0, 0.5e9, 0), "large": RankMemory(9e9, 0, 0, 0, 0, 0, 0)}
    figure = plots.memory_bars(memories, 5e9)
    ends = {round(bar.get_x() + bar.get_width(), 3) for bar in figure.axes[0].patches}
    assert {4.5, 9.0} <= ends and texts(figure.axes[0]) == ["4.5 GB", "9 GB", "room"]
    assert legend(figure) == ["weights", "gradients", "optimizer", "activations"]  # no part that nobody holds


def test_the_map_asks_for_every_place():
    figure = plots.bound_map({"one": lambda n, batch: BOUNDS[(n + batch) % 5]}, [1, 2], [4, 8, 16], 512)
    colors = dict(zip(legend(figure), (each.get_facecolor() for each in figure.legends[0].get_patches()), strict=True))
    grid = figure.axes[0].images[0].get_array()
    for row, column, batch, n in ((0, 0, 4, 1), (2, 1, 16, 2)):
        assert to_hex(grid[row, column]) == to_hex(colors[BOUNDS[(n + batch) % 5]])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["2 Ki", "8 Ki"]


def test_sliders_in_jupyterlab_and_a_picture_elsewhere(monkeypatch):
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    assert len(plots.bound_sliders().axes) == 1
    ipywidgets = pytest.importorskip("ipywidgets")
    shown = {}
    monkeypatch.setattr(ipywidgets, "interact", lambda function, **controls: shown.update(controls))
    monkeypatch.setenv("JPY_SESSION_NAME", "15_accounting.ipynb")
    assert plots.bound_sliders() is None
    assert list(shown) == ["model", "cluster", "tp", "checkpointing"] and "XXL" in shown["model"]
