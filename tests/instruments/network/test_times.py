"""When transfers begin and end: what the ranks' logs say, exactly; and that waits last as long, without processor."""

import datetime
import itertools
import statistics
import threading
import time

import pytest
import torch
import torch.distributed as dist

from scratch_ddp.instruments.network import Link, linked_group, lone_rank
from scratch_ddp.instruments.network.clock import now, sleep_until
from scratch_ddp.instruments.network.work import Alarm
from tests.ranks import run_ranks

pytestmark = pytest.mark.measures_time

ALPHA, BETA = 0.004, 1e-7
X = 10_000  # elements of 4 bytes: 4 ms for all of them


@pytest.fixture
def pair():
    """A lone rank of two: 4 ms a call, 4 ms for X elements."""
    yield lone_rank(2, Link(ALPHA, BETA))
    dist.destroy_process_group()


def spans(group):
    return [(transfer.started, transfer.ended) for transfer in group.transfers]


def close(one, other):
    """The same moments, to a microsecond: pytest's own tolerance is relative to the time since the machine started."""
    return all(abs(a - b) < 1e-6 for a, b in zip(one, other, strict=True))


def lengths(group):
    return [ended - started for started, ended in spans(group)]


def test_a_transfer_takes_alpha_and_beta(pair):
    for elements in (0, X, 4 * X):
        dist.all_reduce(torch.ones(elements))
    dist.barrier()
    assert lengths(pair) == pytest.approx([ALPHA + BETA * 4 * elements for elements in (0, X, 4 * X, 0)])
    assert [(transfer.call, transfer.nbytes) for transfer in pair.transfers][2:] == [
        ("all_reduce", 16 * X),
        ("barrier", 0),
    ]


def test_waits_are_as_long_as_the_transfers(pair):
    """On the whole: one that ends late because the machine is busy is made up for by the next."""
    pair.link = Link(0.02, 5e-7)  # 40 ms: a call itself takes a quarter of one
    medians = []
    for _ in range(5):
        took = [time.monotonic()]
        for _ in range(7):
            dist.all_reduce(torch.ones(X))
            took.append(time.monotonic())
        assert took[-1] - took[0] > 7 * 0.040 - 0.021
        medians.append(statistics.median(later - earlier for earlier, later in itertools.pairwise(took)))
    assert min(abs(median / 0.040 - 1) for median in medians) < 0.03


def test_waiting_uses_no_processor(pair):
    pair.link = Link(0.4, 0)
    wait = dist.all_reduce(torch.ones(1), async_op=True).wait
    used = time.process_time()
    wait()
    assert time.process_time() - used < 0.04


def test_transfers_queue(pair):
    pair.link = Link(0.1, 0)
    works = [dist.all_reduce(torch.ones(X), async_op=True) for _ in range(3)]
    assert not works[0].is_completed()
    works[2].wait()
    assert time.monotonic() >= pair.transfers[2].ended
    assert all(work.is_completed() and work.is_success() for work in works)
    (a, b), (c, d), (e, f) = spans(pair)
    assert a < b == c < d == e < f
    assert pair.busy_seconds == pytest.approx(0.3)


def test_a_change_of_link_leaves_what_is_under_way(pair):
    slow = dist.all_reduce(torch.ones(X), async_op=True)
    pair.link = Link(0, 0)
    dist.all_reduce(torch.ones(1))
    assert slow.is_completed() and lengths(pair) == pytest.approx([0.008, 0])


def test_a_limit_of_time(pair):
    work = dist.all_reduce(torch.ones(100 * X), async_op=True)
    with pytest.raises(RuntimeError, match="all_reduce: not finished after 0.05 s"):
        work.wait(datetime.timedelta(seconds=0.05))
    assert work.wait(datetime.timedelta(seconds=10))


def the_thread_goes():
    deadline = time.monotonic() + 5
    while any(thread.name == "transfer-alarm" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "the thread is still there"
        time.sleep(0.01)


def test_a_future_comes_in_time_and_its_thread_goes(pair):
    x = torch.ones(X)
    futures = [dist.all_reduce(x, async_op=True).get_future() for _ in range(2)]
    assert any(thread.name == "transfer-alarm" for thread in threading.enumerate())
    value = futures[1].wait()
    assert time.monotonic() >= pair.transfers[1].ended and value[0] is not None and futures[0].done()
    assert value[0].data_ptr() == x.data_ptr()
    the_thread_goes()


def test_the_thread_goes_with_the_group(pair):
    pair.link = Link(100, 0)
    futures = [dist.all_reduce(torch.ones(1), async_op=True).get_future() for _ in range(3)]
    dist.destroy_process_group(lone_rank(2, None))
    assert not any(future.done() for future in futures)
    pair.shutdown()
    for future in futures:
        future.wait()
    the_thread_goes()


def test_an_alarm_set_earlier_rings_earlier():
    alarm, rang, now = Alarm(), [], time.monotonic()
    for late in (0.2, 0.05, 0.1):
        alarm.at(now + late, lambda late=late: rang.append((late, time.monotonic() - now)))
    time.sleep(0.3)
    assert [late for late, _ in rang] == [0.05, 0.1, 0.2]
    assert all(at >= late for late, at in rang)


def test_sleeping_until_a_moment_that_has_passed():
    began = time.monotonic()
    sleep_until(began - 1)
    assert time.monotonic() - began < 0.01


def test_a_sleep_that_was_too_long_is_made_up_for(monkeypatch):
    """Up to a limit: who was stopped for longer does not rush afterwards."""
    sleep = time.sleep

    def two_sleeps(too_long):
        """By how much both together were too long, where the first one surely was."""
        sleep_until(now() + 0.05)
        began = now()
        monkeypatch.setattr(time, "sleep", lambda seconds: sleep(seconds + too_long))
        sleep_until(began + 0.05)
        monkeypatch.setattr(time, "sleep", sleep)
        sleep_until(now() + 0.05)
        return time.monotonic() - began - 0.1

    assert min(two_sleeps(0.01) for _ in range(5)) < 0.005
    assert min(two_sleeps(0.5) for _ in range(2)) > 0.47


def test_sixty_four_ranks(pair):
    """Seconds a round count where a ring is long; the ring of 64 sends almost twice the bytes."""
    many, x = lone_rank(64, Link(ALPHA, BETA, per_round=1e-5)), torch.ones(X)
    dist.all_reduce(x, group=many)
    dist.all_gather([torch.empty(1)] * 64, x[:1], group=many)
    assert lengths(many) == pytest.approx([ALPHA + 126e-5 + BETA * 4 * X * 126 / 64, ALPHA + 63e-5 + BETA * 4 * 63])


def test_ranks_begin_together_when_the_last_one_is_ready():
    """Every rank's log has the same moments, whichever comes late, and however many are under way."""

    def late():
        rank, group = dist.get_rank(), linked_group(Link(ALPHA, BETA))
        for who in range(3):
            if rank == who:
                time.sleep(0.05)
            dist.all_reduce(torch.ones(X), group=group)
        if rank == 1:
            time.sleep(0.05)
        works = [dist.all_reduce(torch.ones(X), group=group, async_op=True) for _ in range(4)]
        for work in reversed(works):
            work.wait()
        return spans(group), [transfer.posted for transfer in group.transfers]

    (first, posted_0), (second, posted_1), (third, posted_2) = run_ranks(3, late)
    assert all(close(one, two) and close(one, three) for one, two, three in zip(first, second, third, strict=True))
    last = [max(each) for each in zip(posted_0, posted_1, posted_2, strict=True)]
    begins = [started for started, _ in first]
    assert close(begins[:4], last[:4])
    assert close(begins[4:], [ended for _, ended in first[3:6]])  # the others queue


def test_only_those_that_matter_hold_a_rank_up():
    def rooted():
        rank, group = dist.get_rank(), linked_group(Link(ALPHA, BETA))
        dist.barrier(group=group)
        if rank == 2:
            time.sleep(0.1)
        dist.broadcast(torch.ones(X), 0, group=group)  # rank 1 need not wait for rank 2
        dist.barrier(group=group)
        if rank == 0:
            time.sleep(0.1)
        dist.broadcast(torch.ones(X), 0, group=group)  # both wait for the source
        return spans(group)

    one, two, three = run_ranks(3, rooted)
    assert abs(two[1][0] - one[1][0]) < 0.05 < three[1][0] - two[1][0]
    assert close(one[3], two[3]) and close(two[3], three[3])
