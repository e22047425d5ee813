"""When what crosses the link begins and ends by the ranks' logs; waits as long, and interrupts."""

import itertools
import os
import signal
import statistics
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.instruments.network import Link, linked_group, lone_rank
from scratch_ddp.instruments.network.clock import now, take_time
from tests.ranks import run_ranks

ALPHA, BETA = 0.004, 1e-7
X = 10_000  # elements of 4 bytes: 4 ms for all of them
COST = ALPHA + BETA * 4 * X


@pytest.fixture
def pair():
    """A lone rank of two."""
    yield lone_rank(2, Link(ALPHA, BETA))
    dist.destroy_process_group()


def spans(group):
    return [(each.started, each.ended) for each in group.transfers]


def same(one, other):
    """The same moments, to a microsecond: pytest's own tolerance is relative to the time since the machine started."""
    return all(abs(a - b) < 1e-6 for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


def test_messages_begin_when_both_ends_are_ready_and_leave_a_rank_one_after_the_other():
    """A star: the source's wire is taken by one message after the other, though all receivers but one wait."""

    def star():
        rank, group, x = dist.get_rank(), linked_group(Link(ALPHA, BETA)), torch.ones(X)
        works = [dist.irecv(x, None if rank == 1 else 0, group=group)] if rank in (1, 2) else []
        dist.barrier()
        if rank == 0:
            works = [dist.isend(x, peer, group=group) for peer in (1, 2, 3)]
        elif rank == 3:
            time.sleep(0.05)
            works = [dist.irecv(x, 0, group=group)]
        for work in works:
            work.wait()
        return spans(group)

    source, *others = run_ranks(4, star)
    ends = sorted(ended for _, ended in source)
    assert all(later - earlier >= 0.999 * COST for earlier, later in itertools.pairwise(ends))
    assert all(same([mine], other) for mine, other in zip(source, others, strict=True))
    assert [ended - started for started, ended in source] == pytest.approx([COST] * 3)


def test_ranks_begin_together_when_the_last_one_is_ready():
    """Every rank's log has the same moments, whichever comes late, and however many are under way."""

    def late():
        rank, group = dist.get_rank(), linked_group(Link(ALPHA, BETA))
        for who in range(3):
            if rank == who:
                time.sleep(0.05)
            dist.all_reduce(torch.ones(X), group=group)
        works = [dist.all_reduce(torch.ones(X), group=group, async_op=True) for _ in range(4)]
        for work in reversed(works):
            work.wait()
        return spans(group), [transfer.posted for transfer in group.transfers]

    (first, posted_0), (second, posted_1), (third, posted_2) = run_ranks(3, late)
    assert same(first, second) and same(first, third)
    last = [max(each) for each in zip(posted_0, posted_1, posted_2, strict=True)]
    begins = [started for started, _ in first]
    assert begins[:4] == pytest.approx(last[:4], abs=1e-6)
    queued = [max(at, ended) for at, (_, ended) in zip(last[4:], first[3:6], strict=True)]
    assert begins[4:] == pytest.approx(queued, abs=1e-6)


@pytest.mark.measures_time
def test_waits_are_as_long_as_the_transfers(pair):
    """On the whole: one that ends late because the machine is busy is made up for by the next."""
    works = [dist.all_reduce(torch.ones(X), async_op=True) for _ in range(3)]
    works[2].wait()
    assert time.monotonic() >= pair.transfers[2].ended and all(work.is_completed() for work in works)
    (_, b), (c, d), (e, _) = spans(pair)
    assert (b, d) == (c, e), "transfers queue"
    pair.link = Link(0.02, 5e-7)  # 40 ms: a call itself takes a quarter of one
    took = [time.monotonic()]
    for _ in range(7):
        dist.all_reduce(torch.ones(X))
        took.append(time.monotonic())
    median = statistics.median(later - earlier for earlier, later in itertools.pairwise(took))
    assert abs(median / 0.040 - 1) < 0.03


def test_a_future_comes_in_time_and_its_thread_goes_with_it_or_with_the_group(pair):
    x = torch.ones(X)
    futures = [dist.all_reduce(x, async_op=True).get_future() for _ in range(2)]
    value = futures[1].wait()
    assert time.monotonic() >= pair.transfers[1].ended and value[0].data_ptr() == x.data_ptr()
    futures[0].wait()
    pair.link = Link(100, 0)
    future = dist.all_reduce(x, async_op=True).get_future()
    assert not future.done()
    pair.shutdown()
    future.wait()
    for thread in threading.enumerate():
        if thread.name == "transfer-alarm":
            thread.join(60)
            assert not thread.is_alive()


def interrupted(is_message, group):
    """Seconds in an operation of a minute that is interrupted after 0.3 s, and then in the same on a quick link."""

    def operate():
        if not is_message:
            return dist.all_reduce(torch.ones(1), group=group)
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        sent = dist.isend(torch.ones(1), group=group, group_dst=(rank + 1) % size)
        dist.recv(torch.ones(1), group=group, group_src=(rank - 1) % size)
        return sent.wait()

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    group.link = Link(60, 0)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        operate()
    ended = time.monotonic()
    group.link = Link(0.001, 0)
    operate()
    return ended - began, time.monotonic() - ended


@pytest.mark.measures_time
def test_an_interrupt_ends_the_wait_and_frees_the_link():
    """All ranks are interrupted, as by Ctrl-C."""

    def in_turn():
        group = linked_group(None)
        return [interrupted(is_message, group) for is_message in (False, True)]

    assert all(stopped < 2 and after < 1 for found in run_ranks(2, in_turn) for stopped, after in found)


def test_a_layer_takes_the_time_that_is_said():
    layer, inputs, arrived = nn.Linear(3, 2), torch.randn(4, 3), []
    layer.weight.register_post_accumulate_grad_hook(lambda _: arrived.append(now()))
    began = now()
    output = take_time(layer(inputs), 0.03, 0.06)
    assert torch.equal(output, layer(inputs)) and now() - began >= 0.03
    output.square().sum().backward()
    assert arrived[0] - began >= 0.09
