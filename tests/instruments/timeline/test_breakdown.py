"""A breakdown's parts don't overlap and add up to the step; waiting is told from sending by all ranks' calls."""

import time
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from matplotlib import pyplot as plt

from scratch_ddp.course.plots import breakdown_chart
from scratch_ddp.instruments.network import Link, linked_group
from scratch_ddp.instruments.network.clock import take_time
from scratch_ddp.instruments.timeline import (
    PARTS,
    Span,
    Timeline,
    as_table,
    breakdown,
    breakdown_of_steps,
    by_call_site,
    by_operator,
    timeline,
    waited_for,
)
from scratch_ddp.instruments.timeline.spans import write_trace
from tests.ranks import run_ranks


def _recorded(rank, computing, called, sent, ended, **more):
    """A rank that computes until `computing` and calls one all-reduce."""
    return Timeline(
        rank=rank,
        start=0.0,
        end=10.0,
        compute=[Span("data", 0.0, 1.0), Span("backward", 1.0, computing)],
        waits=[Span("wait", max(called, computing), ended)],
        communication=[Span("all_reduce", sent, ended, 8, called)],
        **more,
    )


FAST, LATE = _recorded(0, 3.0, 2.0, 6.0, 8.0), _recorded(1, 6.0, 6.0, 6.0, 8.0)


def _seconds(parts):
    return {name: parts.seconds(name) for name in PARTS if parts.seconds(name)}


def test_waiting_is_until_the_last_rank_has_called():
    fast, late = breakdown([FAST, LATE])
    assert _seconds(fast) == {"data": 1, "backward": 2, "waiting": 3, "transfer": 2, "idle": 2}
    assert _seconds(late) == {"data": 1, "backward": 5, "transfer": 2, "idle": 2}
    assert fast.seconds() == fast.step == late.seconds() == 10 and (fast.busy, late.busy) == (3, 6)
    assert waited_for([FAST, LATE]) == {0: 0, 1: 4}
    assert as_table([fast, late]).splitlines()[1].split() == [
        "0",
        *["2000.0", "1000.0", "3000.0", "2000.0", "2000.0", "10000.0"],
    ]


def test_without_a_link_the_transfer_begins_when_the_last_rank_begins():
    spans = [replace(each.communication[0], posted=None, start=start) for each, start in ((FAST, 2.0), (LATE, 6.0))]
    fast, late = breakdown([replace(FAST, communication=spans[:1]), replace(LATE, communication=spans[1:])])
    assert (fast.seconds("waiting"), fast.seconds("transfer"), late.seconds("waiting")) == (3, 2, 0)


def test_a_message_waits_until_it_is_on_the_wire():
    received = Span("recv", 4.0, 5.0, 8, 2.0)
    (alone,) = breakdown([Timeline(0, 0.0, 6.0, waits=[Span("wait", 2.0, 5.5)], communication=[received])])
    assert _seconds(alone) == {"waiting": 2, "transfer": 1.5, "idle": 2.5}


def test_steps_cut_what_reaches_beyond_them():
    marked = [replace(each, steps=[(0.0, 4.0), (4.0, 9.0)]) for each in (FAST, LATE)]
    (first, _), (second, late) = breakdown_of_steps(marked)
    assert _seconds(first) == {"data": 1, "backward": 2, "waiting": 1}
    assert _seconds(second) == {"waiting": 2, "transfer": 2, "idle": 1}
    assert _seconds(late) == {"backward": 2, "transfer": 2, "idle": 1}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ([], "there is no timeline to divide"),
        ([Timeline()], "rank 0 recorded nothing: its block of timeline"),
        ([FAST, replace(LATE, compute=[Span("forward", 3.0, 2.0)])], "rank 1: 'forward' ends 1 s before it starts"),
        ([FAST, replace(LATE, communication=[])], "different collectives .rank 0 1, rank 1 0."),
        ([replace(FAST, waits=[Span("wait", 1, 3), Span("wait", 2, 4)])], "rank 0: two waits overlap by 1 s"),
    ],
)
def test_what_cannot_be_divided_is_named(wrong, says):
    with pytest.raises(ValueError, match=says):
        breakdown(wrong)


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        (([], []), "no steps were recorded: put each one into a block"),
        (([(0.0, 1.0)], []), "different numbers of steps: rank 0 1, rank 1 0"),
        (([(0.0, 2.0), (1.0, 3.0)],) * 2, "rank 0: two steps overlap by 1 s"),
    ],
)
def test_steps_that_cannot_be_compared_are_named(steps, says):
    with pytest.raises(ValueError, match=says):
        breakdown_of_steps([replace(each, steps=mine) for each, mine in zip((FAST, LATE), steps, strict=True)])


def test_operators_without_what_they_call_and_unknown_names():
    spans = [Span("linear", 0.0, 4.0), Span("mm", 1.0, 3.0), Span("linear", 5.0, 6.0), Span("mm", 9.0, 9.5)]
    recorded = replace(FAST, operations=spans)
    assert by_operator(recorded) == {"linear": 3.0, "mm": 2.5}
    assert by_operator(recorded, replace(breakdown([FAST])[0], end=4.0)) == {"linear": 2.0, "mm": 2.0}
    with pytest.raises(ValueError, match="there is no part 'sync'; there are forward"):
        breakdown([FAST])[0].seconds("sync")
    with pytest.raises(ValueError, match="rank 0 recorded no lines"):
        by_call_site(FAST, breakdown([FAST])[0])


def _profile():
    """Rank 1 takes 60 ms longer in forward. Each rank's own clock of each step; the ranks' breakdowns; lines."""
    group = linked_group(Link(0.03, 0))
    clock = []
    with timeline(group, call_sites=True) as recorded:
        for _ in range(2):
            with recorded.step():
                began = time.perf_counter()
                with torch.profiler.record_function("data"):
                    time.sleep(0.02)
                weight = torch.ones(2, requires_grad=True)
                take_time(weight * 2, 0.02 + 0.06 * dist.get_rank(), 0.03).sum().backward()
                dist.all_reduce(weight.grad, group=group)
                clock.append(time.perf_counter() - began)
    timelines = recorded.over_ranks()
    steps = breakdown_of_steps(timelines)
    lines = by_call_site(recorded, steps[1][dist.get_rank()], "waiting", "transfer")
    return clock, steps, lines, waited_for(timelines), timelines


def test_on_real_ranks_the_parts_are_the_step_and_the_late_rank_is_found(tmp_path):
    results = run_ranks(2, _profile)
    for rank, (clock, steps, lines, waited, _) in enumerate(results):
        assert steps == results[0][1]
        for seconds, ranks in zip(clock, steps, strict=True):
            mine = ranks[rank]
            assert mine.seconds() == pytest.approx(mine.step) == pytest.approx(seconds, rel=0.01, abs=5e-3)
            pieces = sorted(piece for intervals in mine.parts.values() for piece in intervals)
            assert all(end == start for (_, end), (start, _) in pairwise(pieces))
            assert mine.seconds("data") >= 0.02 and mine.seconds("backward") > 0.01  # a late sleep shortens the next
            assert ranks[0].seconds("waiting") > ranks[1].seconds("waiting") + 0.02
        assert "all_reduce" in next(iter(lines))
        assert waited[1] > waited[0]
    write_trace(results[0][4], tmp_path / "trace.json")
    assert '"your lines"' in (tmp_path / "trace.json").read_text()


def test_the_chart_has_a_bar_per_rank_and_shows_the_parts_that_there_are():
    figure = breakdown_chart({"one": breakdown([FAST, LATE]), "two": breakdown([FAST, LATE])})
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["backward", "data", "waiting", "transfer", "idle"]
    assert [each.get_text() for each in figure.axes[0].get_yticklabels()] == ["rank 0", "rank 1"]
    drawn = sum(path.get_extents().width for each in figure.axes[0].collections for path in each.get_paths())
    assert drawn == pytest.approx(2 * 2 * 10_000)  # the parts of two ranks, and a frame around each
    plt.close(figure)
