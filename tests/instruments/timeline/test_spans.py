"""Timelines of real ranks: what is computing, what waits, what is on the wire, on one clock."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scratch_ddp.cells.rank import interruptible_group
from scratch_ddp.ddp import FlatDDP, OverlappedDDP
from scratch_ddp.instruments.network import Link, linked_group, lone_rank
from scratch_ddp.instruments.timeline import timeline
from tests.ranks import RankFailed, run_ranks

LINK = Link(alpha=1e-3, beta=2e-8)
PARAMETERS = 8  # of the model
BYTES = 4 * (300 * 300 + 300)  # of a layer's gradients


def _model():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(300, 300) for _ in range(PARAMETERS // 2)])


def _step(strategy, group, link=None):
    """One recorded step; [the timelines of all ranks, this rank's]."""
    if link is not None:
        group = linked_group(link, group)
    model = strategy(_model(), group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(64, 300)
    for recorded in (False, True):
        if recorded:
            with timeline(group) as mine:
                _train(model, inputs, optimizer)
        else:
            _train(model, inputs, optimizer)
    return mine.over_ranks(), mine


def _train(model, inputs, optimizer):
    model(inputs).sum().backward()
    getattr(model, "sync_gradients", lambda: None)()
    optimizer.step()
    optimizer.zero_grad()


def _torchs(model, group):
    return DistributedDataParallel(model, process_group=group)


def _interruptible():
    return dist.new_group(backend=interruptible_group.BACKEND)


@pytest.mark.parametrize("new_group", [lambda: None, _interruptible], ids=["gloo", "interruptible"])
def test_phases_follow_one_another_on_every_rank(new_group):
    results = run_ranks(2, lambda: _step(FlatDDP, new_group()))
    for seen_by_all, mine in results:
        assert [each.rank for each in seen_by_all] == [0, 1]
        assert mine == seen_by_all[mine.rank] == results[1 - mine.rank][0][mine.rank]
        names = list(dict.fromkeys(span.name for span in mine.compute))
        assert names == ["forward", "backward", "other", "optimizer"]
        order = [mine.start, *(moment for span in mine.compute for moment in (span.start, span.end)), mine.end]
        assert order == sorted(order)
        assert 0 < mine.seconds("backward") < mine.seconds() < mine.end - mine.start
        flat = [span for span in mine.communication if span.nbytes >= BYTES]
        assert [span.name for span in flat] == ["all_reduce"]
        assert flat[0].nbytes == PARAMETERS // 2 * BYTES
        assert flat[0].start > max(span.end for span in mine.compute if span.name == "backward")
        assert mine.exposed_seconds() == pytest.approx(mine.communication_seconds())


def test_waiting_is_not_computing():
    for seen_by_all, _ in run_ranks(2, lambda: _step(FlatDDP, None, Link(0.05, 0))):
        for mine in seen_by_all:
            waited = [span for span in mine.waits if span.end - span.start > 0.02]
            assert waited and sum(span.end - span.start for span in waited) > 0.04
            for wait in waited:
                assert not any(span.start < wait.end and wait.start < span.end for span in mine.compute)


def test_on_a_link_communication_is_what_the_link_carried():
    for seen_by_all, _ in run_ranks(2, lambda: _step(OverlappedDDP, None, LINK)):
        assert any(mine.exposed_seconds() < mine.communication_seconds() for mine in seen_by_all)
        for mine in seen_by_all:
            messages = mine.communication[:PARAMETERS]
            assert {span.name for span in messages} == {"all_reduce"}
            assert sum(span.nbytes for span in messages) == PARAMETERS // 2 * BYTES
            backward = [span for span in mine.compute if span.name == "backward"]
            assert all(backward[0].start <= span.posted + 0.03 and span.posted <= span.start for span in messages)
            for span in messages:
                seconds = LINK.seconds(span.nbytes, 2)
                assert span.end - span.start == pytest.approx(seconds)
            assert mine.exposed_seconds() <= mine.communication_seconds()


def test_torchs_ddp_and_a_link_that_is_off():
    def both():
        linked, _ = _step(_torchs, None, LINK)
        plain, _ = _step(_torchs, None)
        return linked, plain

    for linked, plain in run_ranks(2, both):
        for mine in [*linked, *plain]:
            assert {"forward", "backward", "optimizer"} <= {span.name for span in mine.compute}
            gradients = [span.nbytes for span in mine.communication if span.nbytes >= BYTES]
            assert sum(gradients) == PARAMETERS // 2 * BYTES


class Sleeps(torch.autograd.Function):
    """A layer that takes the same time on any machine."""

    @staticmethod
    def forward(ctx, x):
        time.sleep(0.02)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.1)
        return gradient


@pytest.fixture
def lone():
    yield lone_rank
    dist.destroy_process_group()  # a lone rank in a process without a default group becomes it


@pytest.mark.parametrize("seconds", [0.06, 0.15])
@pytest.mark.parametrize("in_backward", [True, False])
def test_exposed_seconds_of_a_lone_rank(lone, seconds, in_backward):
    group = lone(2, Link(seconds, 0))
    works = []

    def send(_=None):
        works.append(dist.all_reduce(torch.ones(1), group=group, async_op=True))

    with timeline(group) as mine:
        loss = Sleeps.apply(torch.ones(1, requires_grad=True)) * 1.0
        if in_backward:
            loss.register_hook(send)
        loss.sum().backward()
        if not in_backward:
            send()
        works[0].wait()
    (message,) = mine.over_ranks()[0].communication
    assert message.end - message.start == pytest.approx(seconds)
    assert mine.seconds("forward") >= 0.02 and mine.seconds("backward") >= 0.1
    backward_ends = max(span.end for span in mine.compute if span.name == "backward")
    sticks_out = max(0.0, message.end - max(backward_ends, message.start))
    assert mine.exposed_seconds() == pytest.approx(sticks_out, abs=0.02)
    if not in_backward:
        assert sticks_out == pytest.approx(seconds, abs=0.021)  # the link's clock may be 20 ms behind
    elif seconds < 0.1:  # the hook is called before the layer sleeps
        assert sticks_out == 0


def test_a_range_named_by_hand_and_a_wait_inside_a_range():
    with timeline() as mine:
        with torch.profiler.record_function("optimizer"):
            torch.ones(10)
        torch.ones(10)
        torch.nn.functional.linear(torch.ones(2), nn.Parameter(torch.ones(2, 2))).sum().backward()
        with torch.profiler.record_function("evaluation"):
            torch.ones(10)
    assert list(dict.fromkeys(span.name for span in mine.compute)) == ["optimizer", "forward", "backward", "other"]
    assert (mine.rank, mine.communication, mine.waits) == (0, [], [])


def test_an_exception_and_a_second_timeline():
    wait = dist.Work.wait
    with pytest.raises(ZeroDivisionError), timeline() as mine:
        torch.ones(10)
        1 / 0  # noqa: B018
    assert [span.name for span in mine.compute] == ["other"]
    with timeline(), pytest.raises(RuntimeError, match="profiler is on already"), timeline():
        pass
    assert dist.Work.wait is wait


def test_a_rank_that_raises_is_named():
    def leave():
        with timeline():
            if dist.get_rank() == 1:
                raise RuntimeError("mine")

    with pytest.raises(RankFailed) as failed:
        run_ranks(2, leave)
    assert "RuntimeError: mine" in failed.value.failures[1]
