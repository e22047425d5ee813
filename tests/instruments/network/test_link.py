"""A link: every operation gives what gloo gives, begins and ends by the ranks' logs, and takes as long as forecast."""

import itertools
import statistics
import tempfile
import threading
import time
from functools import partial

import pytest
import torch
import torch._dynamo  # noqa: F401  imported at first use: once here, not in every forked rank
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import scratch_ddp.cells.rank.interruptible_group  # noqa: F401  registers the backend of rank cells
from scratch_ddp.benchmark.steps import step
from scratch_ddp.course.pages.sleeping import SleepingModel
from scratch_ddp.ddp import BucketedDDP, FlatDDP, OverlappedDDP, SimpleDistributedDataParallelism
from scratch_ddp.instruments import cost
from scratch_ddp.instruments.cost import Backward
from scratch_ddp.instruments.network import PRESETS, Link, linked_group, lone_rank
from scratch_ddp.instruments.network.hosts import Hosts, share_hosts
from scratch_ddp.instruments.traffic import traffic
from scratch_ddp.instruments.traffic.calls import Call
from tests.cells.group_cases import COLLECTIVES, run_cases
from tests.cells.group_users import USERS, torch_ddp
from tests.ranks import run_ranks

QUICK = Link(1e-4, 1e-9)


@pytest.fixture
def no_group_left():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_lone_rank_is_the_default_group_where_there_is_none(no_group_left):
    group = lone_rank(64, "Ethernet 10 Gb", rank=7)
    assert (dist.get_rank(), dist.get_world_size(), dist.group.WORLD) == (7, 64, group)
    further = lone_rank(4, None, rank=2)
    assert (dist.get_rank(further), dist.get_world_size(further)) == (2, 4)
    assert dist.get_process_group_ranks(further) == [0, 1, 7, 2]  # 7 is this process


def test_the_link_is_switched_in_a_line(no_group_left):
    group, x = lone_rank(2, Link(1e-4, 0, "first")), torch.ones(1)
    for link in (Link(1e-4, 0), None, "Ethernet 10 Gb"):
        group.link = link
        dist.all_reduce(x)
    assert x.item() == 8
    took = [transfer.ended - transfer.started for transfer in group.transfers]
    assert took == pytest.approx([1e-4, 0, PRESETS["Ethernet 10 Gb"].seconds(4, 2)], rel=1e-3)


def test_what_is_refused(no_group_left):
    lone = lone_rank(3, None)
    for message, call in {
        "there is no link 'Token Ring'; there are 'T4 over PCIe', ": lambda: lone_rank(2, "Token Ring"),
        "this group is on a link already": lambda: linked_group(None, lone),
        "3 ranks need the number of a host each, not 2": lambda: share_hosts((0, 1), lone),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_what_is_destroyed_is_gone(tmp_path):
    def made_and_destroyed():
        tempfile.tempdir = str(tmp_path)
        world, x = dist.distributed_c10d._world, torch.ones(1)
        before = len(world.pg_map)
        linked = linked_group("NVLink 4")
        dist.all_reduce(x, group=linked)
        dist.destroy_process_group(linked)
        dist.all_reduce(x)
        return x.item(), len(world.pg_map) - before

    assert run_ranks(2, made_and_destroyed) == [(4, 0)] * 2 and list(tmp_path.iterdir()) == []


CASES = [case for case in [*COLLECTIVES, *USERS] if case.__name__ not in ("sub_groups", "plain_gloo_sub_group")]


def counted_cases(cases):
    """{name of the case: (what it returned, calls, bytes sent)}; through the link, if that is the default group."""
    found, transfers = {}, getattr(dist.group.WORLD, "transfers", None)
    for case in cases:
        before = len(transfers or [])
        with traffic() as counted:
            found |= run_cases([case])
        found[case.__name__] = found[case.__name__], counted.calls, counted.wire_bytes
        if transfers is not None and case.__name__ != "meshes":  # which makes groups of its own
            assert len(transfers) - before >= sum(counted.calls.values()), case.__name__
    return found


@pytest.mark.parametrize(("backend", "cases"), [("gloo", CASES), ("interruptible", [torch_ddp])])
def test_gives_what_a_plain_group_gives(backend, cases):
    """And is counted once, as without a link. The cases use the default group, so a linked one takes its place."""

    def on_a_link():
        dist.distributed_c10d._update_default_pg(linked_group(QUICK))
        return counted_cases(cases)

    plainly = run_ranks(4, counted_cases, cases, backend=backend, timeout=100)
    for plain, linked in zip(plainly, run_ranks(4, on_a_link, backend=backend, timeout=100), strict=True):
        for case, value in plain.items():
            assert not isinstance(value[0], str), f"the case itself is wrong: {value}"
            assert equal(value, linked[case]), f"{case}: plainly {value}, by the link {linked[case]}"


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return one == other


def test_a_lone_rank_trains_as_one_of_equal_ranks(no_group_left):
    (alone,) = run_ranks(1, torch_ddp)
    lone_rank(64, QUICK)
    assert equal(alone, torch_ddp())


TIMELINE = Backward((0.01, 0.03, 0.03, 0.06), (400, 40_000, 4, 80_000), 0.08, 0.04)
STRATEGIES = {
    "naive": (SimpleDistributedDataParallelism, cost.naive),
    "flat": (FlatDDP, cost.flat),
    "per parameter": (OverlappedDDP, cost.per_parameter),
    "buckets": (partial(BucketedDDP, bucket_mb=0.03), partial(cost.bucketed, bucket_mb=0.03)),
    "torch": (partial(DistributedDataParallel, bucket_cap_mb=0.03), partial(cost.bucketed, bucket_mb=0.03)),
}


@pytest.mark.measures_time
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_step_is_as_forecast(name, no_group_left):
    """On a link on which the gradients of TIMELINE take 60 ms."""
    wrap, forecast = STRATEGIES[name]
    slow = lone_rank(2, Link(0.001, 0.06 / TIMELINE.total_bytes))
    planned = forecast(TIMELINE, slow.link.wire(2))
    run = partial(step, wrap(SleepingModel(TIMELINE)))
    run()  # torch's DDP finds out in which order gradients arrive
    slow.transfers.clear()
    run()
    sizes = [message.nbytes for message in planned.all_reduces]
    gradients = [each for each in slow.transfers if each.nbytes in sizes]
    assert sorted(each.nbytes for each in gradients) == sorted(sizes)
    began = gradients[0].posted - planned.all_reduces[0].posted - TIMELINE.forward
    assert gradients[-1].ended - began == pytest.approx(planned.step, rel=0.1)


S, BLOCKS, ALTERNATING = 4800, (0, 0, 1, 1), (0, 1, 0, 1)


@pytest.mark.parametrize(("name", "payload", "root", "blocks", "alternating"), [
    ("all_reduce", S, None, [1.5, 1.5], [3, 3]),
    ("all_gather", S // 4, None, [0.75, 0.75], [1.5, 1.5]),
    ("all_to_all", S, None, [1, 1], [1, 1]),  # two ranks send two quarters each
    ("broadcast", S, 0, [1, 0], [2, 1]),  # 0, 1, 2, 3
    ("gather", S, 0, [0, 2], [0, 2]),
    ("scatter", S, 1, [0.5, 0], [0, 0.5]),  # from rank 1
    ("send", S, 0, [0, 0], [0, 1]),  # the sender is rank 1
    ("barrier", 0, None, [0, 0], [0, 0]),
])  # fmt: skip
def test_bytes_that_leave_a_host(name, payload, root, blocks, alternating):
    for order, expected in ((BLOCKS, blocks), (ALTERNATING, alternating)):
        hosts = Hosts(dict(enumerate(order)), sent := [0.0] * 4)
        for rank in (1,) if name in ("send", "scatter") else range(4):
            hosts.count(Call(name, payload, (0, 1, 2, 3), rank, root))
        assert hosts.bytes_out == [each * S for each in expected], sent
        received = Call(name, 0, (0, 1, 2, 3), 0, root), S // 4  # the source alone knows a scatter's input
        assert name != "scatter" or hosts.seconds(*received, Link(0, 1), Link(0, 0)) == S / 2


ALPHA, BETA = 0.004, 1e-7
X = 10_000  # elements of 4 bytes: 4 ms for all of them
COST = ALPHA + BETA * 4 * X


@pytest.fixture
def pair(no_group_left):
    """A lone rank of two."""
    return lone_rank(2, Link(ALPHA, BETA))


def spans(group):
    """When each transfer began and ended, one after the other; all ranks shall agree to a microsecond."""
    return [moment for each in group.transfers for moment in (each.started, each.ended)]


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
    assert source == pytest.approx(sum(others, []), abs=1e-6) and source == sorted(source)
    took = [ended - started for started, ended in zip(source[::2], source[1::2], strict=True)]
    assert took == pytest.approx([COST] * 3)


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
    assert first == pytest.approx(second, abs=1e-6) and first == pytest.approx(third, abs=1e-6)
    last = [max(each) for each in zip(posted_0, posted_1, posted_2, strict=True)]
    begins, free = first[::2], [0, 0, 0, 0, *first[7:-1:2]]  # the wire: the last four queue
    assert begins == pytest.approx(list(map(max, last, free)), abs=1e-6)


@pytest.mark.measures_time
def test_waits_are_as_long_as_the_transfers(pair):
    """On the whole: one that ends late because the machine is busy is made up for by the next."""
    works = [dist.all_reduce(torch.ones(X), async_op=True) for _ in range(3)]
    works[2].wait()
    assert time.monotonic() >= pair.transfers[2].ended and all(work.is_completed() for work in works)
    _, b, c, d, e, _ = spans(pair)
    assert (b, d) == (c, e), "transfers queue"
    pair.link = Link(0.02, 5e-7)  # 40 ms: a call itself takes a quarter of one

    def off():
        took = [time.monotonic()]
        for _ in range(7):
            dist.all_reduce(torch.ones(X))
            took.append(time.monotonic())
        return abs(statistics.median(later - earlier for earlier, later in itertools.pairwise(took)) / 0.040 - 1)

    assert any(off() < 0.03 for _ in range(5))


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
