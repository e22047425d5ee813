"""One model, split in three ways: what its steps send, and how long they take against the forecast."""

import pytest

from scratch_ddp.course.pages import three_ways
from scratch_ddp.instruments.network import PRESETS, linked_group
from scratch_ddp.instruments.traffic import traffic
from scratch_ddp.pipeline import held, validate
from tests.ranks import run_ranks


def test_forecasts_by_hand():
    """On 10 Gb Ethernet the first gradients wait for a layer's backward, then the wire is busy to the end."""
    link = PRESETS["Ethernet 10 Gb"]
    found = three_ways.forecasts(link)
    a_layer = 2 * 12 * 1024**2 * 4096 / 125e12  # seconds of its forward on one GPU
    all_reduce = 8.4e-6 + 2 * 14e-6 + 2 * 12 * 1024**2 * 8e-10
    assert found["DP"] == pytest.approx(4 * a_layer + a_layer + 8 * all_reduce)
    assert found["TP"] == pytest.approx(12 * a_layer + 32 * (8.4e-6 + 2 * 14e-6 + 2 * 4096 * 1024 * 8e-10))
    assert pytest.approx(24 * a_layer) == three_ways.ALONE
    assert found["PP, 2 more"] < found["PP"] < three_ways.ALONE < found["DP"] / 8


def test_two_more_forwards_are_under_way():
    rows = three_ways.SCHEDULES["PP, 2 more"]
    validate(rows, three_ways.MICRO_BATCHES)
    assert [held(row) for row in rows] == [4, 1] and [held(row) for row in three_ways.SCHEDULES["PP"]] == [2, 1]


def test_what_a_step_sends():
    """Eight gradients; four all-reduces a layer; a message for each micro-batch and way."""

    def ranks():
        group, found = linked_group(None), {}
        for way in three_ways.forecasts(PRESETS["NVLink 4"]):
            step = three_ways._step_of(way, group, 1e-3)
            step()
            with traffic() as counted:
                step()
            found[way] = counted.calls, counted.wire_bytes
        return found

    layer, activations = 12 * 1024**2 * 2 // 512, 4096 * 1024 * 2 // 512
    messages = {"send": 8, "recv": 8}, activations
    for found in run_ranks(2, ranks):
        assert found["DP"] == ({"all_reduce": 8}, 8 * layer)
        assert found["TP"] == ({"all_reduce": 32}, 32 * activations)
        assert found["PP"] == found["PP, 2 more"] == messages


@pytest.mark.measures_time
@pytest.mark.parametrize("link", ["PCIe 4.0 x16", "Ethernet 10 Gb"])
def test_a_step_takes_as_long_as_forecast(link):
    taken = run_ranks(2, lambda: three_ways.measure(link, linked_group(None), rounds=2, seconds=0.3))[0]
    for way, forecast in three_ways.forecasts(PRESETS[link]).items():
        assert 0.99 <= min(taken[way]) / forecast <= 1.15, way
