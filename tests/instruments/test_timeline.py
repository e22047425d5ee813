"""Timelines of real ranks: what computes, what waits, what is on the wire, on one clock; their parts; their trace."""

import contextlib
import gzip
import json
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.autograd import DeviceType

from scratch_ddp.ddp import FlatDDP
from scratch_ddp.instruments.timeline import PARTS, Span, Timeline, as_table, breakdown, breakdown_of_steps, timeline
from scratch_ddp.instruments.timeline.breakdown import by_call_site
from scratch_ddp.instruments.timeline.record import gpu_spans
from tests.ranks import run_ranks


def test_phases_follow_one_another_on_every_rank(tmp_path):
    def ranks():
        model = FlatDDP(nn.Sequential(*[nn.Linear(300, 300) for _ in range(4)]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for recorded in (contextlib.nullcontext(), timeline()):
            with recorded as mine:
                model(torch.ones(64, 300)).sum().backward()
                model.sync_gradients()
                optimizer.step()
                optimizer.zero_grad()
        mine.save(tmp_path / "trace.json.gz")
        names = list(dict.fromkeys(span.name for span in mine.compute))
        assert names == ["forward", "backward", "other", "optimizer"]
        order = [mine.start, *(moment for span in mine.compute for moment in span.interval), mine.end]
        assert order == sorted(order)
        assert 0 < mine.seconds("backward") < mine.seconds() < mine.end - mine.start
        assert {span.name for span in mine.communication} == {"all_reduce"}
        assert mine.communication[-1].start > max(span.end for span in mine.compute if span.name == "backward")
        assert mine.exposed_seconds() == pytest.approx(mine.communication_seconds())
        return mine, mine.over_ranks()

    (first, of_both), (second, also) = run_ranks(2, ranks)
    assert [first, second] == of_both == also
    slices = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    told = [each for each in slices if each["name"] == "all_reduce"]
    took = [1e6 * (span.end - span.start) for each in of_both for span in each.communication]
    assert {each["pid"] for each in told} == {0, 1}  # one trace of both, in microseconds
    assert sorted(each["dur"] for each in told) == pytest.approx(sorted(took), abs=0.01)


def test_a_range_named_by_hand_and_an_exception():
    with pytest.raises(ZeroDivisionError), timeline() as mine:
        with torch.profiler.record_function("optimizer"):
            torch.ones(10)
        torch.ones(10)
        nn.functional.linear(torch.ones(2), nn.Parameter(torch.ones(2, 2))).sum().backward()
        with torch.profiler.record_function("evaluation"):
            torch.ones(10)
        1 / 0  # noqa: B018
    assert list(dict.fromkeys(span.name for span in mine.compute)) == ["optimizer", "forward", "backward", "other"]
    assert (mine.rank, mine.communication, mine.waits) == (0, [], [])


def _recorded(rank, computing, called):
    """A rank that computes until `computing` and calls one all-reduce, which is on its way from 6 to 8 s."""
    compute = [Span("data", 0.0, 1.0), Span("backward", 1.0, computing)]
    return Timeline(rank, 0.0, 10.0, compute, [Span("wait", computing, 8.0)], [Span("all_reduce", 6.0, 8.0, 8, called)])


STEP, FAST, LATE = (0.0, 1.0), _recorded(0, 3.0, 2.0), _recorded(1, 6.0, 6.0)


def _seconds(parts):
    return {name: parts.seconds(name) for name in PARTS if parts.seconds(name)}


def test_waiting_is_until_the_last_rank_has_called():
    fast, late = breakdown([FAST, LATE])
    assert _seconds(fast) == {"data": 1, "backward": 2, "waiting": 3, "transfer": 2, "idle": 2}
    assert _seconds(late) == {"data": 1, "backward": 5, "transfer": 2, "idle": 2}
    assert fast.seconds() == fast.step == late.seconds() == 10
    assert (FAST.exposed_seconds(), FAST.communication_seconds(), FAST.seconds("backward")) == (2, 2, 2)
    figures = ["2000.0", "1000.0", "3000.0", "2000.0", "2000.0", "10000.0"]
    assert as_table([fast, late]).splitlines()[1].split() == ["0", *figures]

    # Without a link, the transfer begins when the last rank begins.
    spans = [replace(each.communication[0], posted=None, start=start) for each, start in ((FAST, 2.0), (LATE, 6.0))]
    fast, late = breakdown([replace(FAST, communication=spans[:1]), replace(LATE, communication=spans[1:])])
    assert (fast.seconds("waiting"), fast.seconds("transfer"), late.seconds("waiting")) == (3, 2, 0)

    received = Span("recv", 4.0, 5.0, 8, 2.0)  # a message waits until it is on the wire
    (alone,) = breakdown([Timeline(0, 0.0, 6.0, waits=[Span("wait", 2.0, 5.5)], communication=[received])])
    assert _seconds(alone) == {"waiting": 2, "transfer": 1.5, "idle": 2.5}


def test_steps_cut_what_reaches_beyond_them():
    marked = [replace(each, steps=[(0.0, 4.0), (4.0, 9.0)]) for each in (FAST, LATE)]
    (first, _), (second, late) = breakdown_of_steps(marked)
    assert _seconds(first) == {"data": 1, "backward": 2, "waiting": 1}
    assert _seconds(second) == {"waiting": 2, "transfer": 2, "idle": 1}
    assert _seconds(late) == {"backward": 2, "transfer": 2, "idle": 1}


@pytest.mark.parametrize(("divide", "says"), [
    (lambda: breakdown([FAST, replace(LATE, communication=[])]), "different collectives"),
    (lambda: breakdown_of_steps([FAST, LATE]), r"`with recorded.step\(\):`"),
    (lambda: breakdown_of_steps([replace(FAST, steps=[STEP]), replace(LATE, steps=[STEP] * 2)]), r"\[1, 2\]"),
    (lambda: by_call_site(FAST, breakdown([FAST])[0]), "rank 0 recorded no lines"),
])  # fmt: skip
def test_what_cannot_be_divided_is_refused(divide, says):
    with pytest.raises(ValueError, match=says):
        divide()


def _event(name, start, duration, number=0, cause=0, device=DeviceType.CUDA):
    """As much of a profiler's event as is read of a GPU's."""
    figures = {"name": name, "start_ns": int(start * 1e9), "duration_ns": int(duration * 1e9), "device_type": device}
    figures |= {"correlation_id": number, "linked_correlation_id": cause, "device_resource_id": 7}
    return Mock(**{f"{key}.return_value": value for key, value in {**figures, "is_user_annotation": False}.items()})


def test_kernels_are_of_the_phase_of_the_operation_that_launched_them():
    compute = [Span("forward", 0.0, 1.0), Span("backward", 1.0, 2.0)]
    launches = [("aten::mm", 0.5, 0.1, 7, 0, DeviceType.CPU), ("aten::mm", 1.5, 0.1, 8, 0, DeviceType.CPU)]
    kernels = [("gemm", 1.2, 1.0, 0, 7), ("gemm", 2.3, 1.0, 0, 8), ("ncclDevKernel_AllReduce_Sum_f32", 2.0, 2.0, 0, 9)]
    events = [_event(*each) for each in launches + kernels]
    computing, communication = gpu_spans(events, compute, later=0.0)
    assert computing == [Span("forward", 1.2, pytest.approx(2.2)), Span("backward", 2.3, pytest.approx(3.3))]
    assert [(span.start, span.end, span.stream) for span in communication] == [(2.0, 4.0, 7)]
