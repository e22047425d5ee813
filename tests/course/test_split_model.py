"""One model, split in several ways: what its steps send, and how long they take against the forecast."""

from statistics import median

import pytest
import torch

from scratch_ddp.course.pages import split_model
from scratch_ddp.instruments.cost import Layout
from scratch_ddp.instruments.network import linked_group
from scratch_ddp.instruments.traffic import traffic
from tests.ranks import run_ranks


def test_what_a_step_sends():
    """Eight gradients; four all-reduces a layer; a message for each micro-batch and way. Two more are under way."""

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
def test_a_step_takes_as_long_as_lesson_14b_forecasts():
    forecasts = [(way, "Ethernet 10 Gb", seconds) for way, seconds in (("DP", 0.1655), ("TP", 0.2258), ("PP", 0.0180))]
    taken = run_ranks(2, lambda: [split_model.measure_way(*each, linked_group(None), 0.3) for each in forecasts])[0]
    for seconds, (way, _, forecast) in zip(taken, forecasts, strict=True):
        assert 0.98 <= seconds / forecast <= 1.15, way


@pytest.mark.measures_time
def test_forecasts_put_layouts_in_order_and_are_hardly_off():
    layouts = [Layout(4, micro=16), Layout(4, micro=16, stage="ZeRO-3"), Layout(2, 2, micro=32), Layout(1, 4, 1, 64)]
    layouts += [Layout(2, 1, 2, 16, 2), Layout(2, 1, 2, 4, 8), Layout(1, 2, 2, 32, 2), Layout(1, 1, 4, 4, 16)]
    taken = run_ranks(4, lambda: [split_model.measure_layout(each, 1.2) for each in layouts])[0]
    forecasts = [split_model.forecast(each) for each in layouts]
    places = torch.tensor([forecasts, taken]).argsort(dim=1).argsort(dim=1)
    assert torch.corrcoef(places.double())[0, 1] >= 0.95, (forecasts, taken)  # Spearman's
    errors = [abs(forecast / seconds - 1) for forecast, seconds in zip(forecasts, taken, strict=True)]
    assert median(errors) <= 0.05, errors
