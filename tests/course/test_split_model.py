"""One model, split in several ways: what its steps send, and how long they take against the forecast."""

import pytest

from scratch_ddp.course.pages import split_model
from scratch_ddp.instruments.cost import Layout
from scratch_ddp.instruments.network import PRESETS, linked_group
from scratch_ddp.instruments.traffic import traffic
from scratch_ddp.pipeline import held, validate
from tests.ranks import run_ranks


def test_two_more_forwards_are_under_way():
    rows = split_model.SCHEDULES["PP, 2 more"]
    validate(rows, split_model.MICRO_BATCHES)
    assert [held(row) for row in rows] == [4, 1] and [held(row) for row in split_model.SCHEDULES["PP"]] == [2, 1]


def test_what_a_step_sends():
    """Eight gradients; four all-reduces a layer; a message for each micro-batch and way."""

    def ranks():
        group, found = linked_group(None), {}
        for way in split_model.WAYS:
            step = split_model.step_of_way(way, group, 1e-3)
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
    taken = run_ranks(2, lambda: split_model.measure_ways(link, linked_group(None), rounds=2, seconds=0.3))[0]
    for way, forecast in split_model.forecasts(PRESETS[link]).items():
        assert 0.99 <= min(taken[way]) / forecast <= 1.15, way


@pytest.mark.measures_time
def test_steps_on_a_cluster_come_in_the_forecast_order():
    """Four layouts, of which each takes half as long again as the one before: even a busy machine keeps that order."""
    layouts = [Layout(4, micro=16), Layout(2, 1, 2, 16, 2), Layout(1, 2, 2, 32, 2), Layout(1, 4, 1, 64)]
    taken = run_ranks(4, lambda: [min(split_model.measure_layout(each, 1, 0.6, 0.006)) for each in layouts])[0]
    assert taken == sorted(taken)
    for layout, seconds in zip(layouts, taken, strict=True):
        assert seconds > 0.95 * split_model.forecast(layout), layout
