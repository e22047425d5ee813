"""What a link carries: every operation gives what gloo gives, training as well, and takes the time that is forecast."""

import tempfile
from functools import partial

import pytest
import torch
import torch._dynamo  # noqa: F401  imported at first use: once here, not in every forked rank
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import scratch_ddp.cells.rank.interruptible_group  # noqa: F401  registers the backend of rank cells
from scratch_ddp.benchmark.steps import step
from scratch_ddp.course.pages.sleeping import SleepingModel
from scratch_ddp.ddp import BucketedDDP, FlatDDP, OverlappedDDP, SimpleDistributedDataParallelism
from scratch_ddp.instruments import cost
from scratch_ddp.instruments.cost import Backward
from scratch_ddp.instruments.network import PRESETS, Link, linked_group, lone_rank
from scratch_ddp.instruments.network.hosts import Hosts
from scratch_ddp.instruments.traffic import traffic
from scratch_ddp.instruments.traffic.calls import Call
from tests.cells.group_cases import COLLECTIVES, run_cases
from tests.cells.group_users import USERS
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


def test_what_is_refused():
    def refused():
        linked = linked_group(None)
        for message, arguments in {
            "there is no link 'Token Ring'; there are 'T4 over PCIe', ": ("Token Ring",),
            "this group is on a link already": (None, linked),
            "3 ranks need the number of a host each, not 2": (None, None, (0, 1)),
        }.items():
            with pytest.raises(ValueError, match=message):
                linked_group(*arguments)

    run_ranks(3, refused)


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


def test_gives_what_plain_gloo_gives():
    """The cases use the default group, so a linked one takes its place."""

    def on_a_link():
        group, through = linked_group(QUICK), {}
        dist.distributed_c10d._update_default_pg(group)
        found = {}
        for case in CASES:
            group.transfers.clear()
            found |= run_cases([case])
            through[case.__name__] = len(group.transfers)
        return found, through

    plain = run_ranks(4, run_cases, CASES, timeout=100)
    for expected, (found, through) in zip(plain, run_ranks(4, on_a_link, timeout=100), strict=True):
        for case, value in expected.items():
            assert not isinstance(value, str), f"the case itself is wrong: {value}"
            assert same(value, found[case]), f"{case}: gloo gave {value}, the link {found[case]}"
            assert through[case] or case == "meshes"  # which makes groups of its own


def same(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return one == other


def train(group, rank):
    """Three steps of torch's DDP; the weights, and what was sent in the last one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6)).double()
    wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.0001) if rank is not None else model
    rows = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6) * ((rank or 0) + 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        with traffic() as counted:
            wrapped(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach() for each in model.parameters()], counted.calls, counted.wire_bytes


@pytest.mark.parametrize("backend", ["gloo", "interruptible"])
def test_training_with_peers_and_alone(backend):
    def both():
        group, rank = linked_group(QUICK), dist.get_rank()
        plain, linked = train(None, rank), train(group, rank)
        assert same(plain[0], linked[0]) and plain[1:] == linked[1:]  # counted once, as without a link
        assert len(group.transfers) >= 3 * sum(linked[1].values())
        # Every peer of a lone rank has the same rows: the mean of the gradients is this rank's own.
        assert same(train(lone_rank(64, QUICK), 0)[0], train(None, None)[0])

    run_ranks(2, both, backend=backend)


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
    off = []
    for _ in range(2):
        slow.transfers.clear()
        run()
        sizes = [message.nbytes for message in planned.all_reduces]
        gradients = [each for each in slow.transfers if each.nbytes in sizes]
        assert sorted(each.nbytes for each in gradients) == sorted(sizes)
        began = gradients[0].posted - planned.all_reduces[0].posted - TIMELINE.forward
        off.append((gradients[-1].ended - began) / planned.step - 1)
    assert min(map(abs, off)) < 0.1, off


S, BLOCKS, ALTERNATING = 4800, (0, 0, 1, 1), (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("name", "payload", "root", "blocks", "alternating"),
    [
        ("all_reduce", S, None, [1.5, 1.5], [3, 3]),
        ("all_gather", S // 4, None, [0.75, 0.75], [1.5, 1.5]),
        ("all_to_all", S, None, [1, 1], [1, 1]),  # two ranks send two quarters each
        ("broadcast", S, 0, [1, 0], [2, 1]),  # 0, 1, 2, 3
        ("gather", S, 0, [0, 2], [0, 2]),
        ("scatter", S, 0, [0.5, 0], [0.5, 0]),
        ("send", S, 0, [0, 0], [0, 1]),  # the sender is rank 1
        ("barrier", 0, None, [0, 0], [0, 0]),
    ],
)
def test_bytes_that_leave_a_host(name, payload, root, blocks, alternating):
    for order, expected in ((BLOCKS, blocks), (ALTERNATING, alternating)):
        hosts = Hosts(dict(enumerate(order)), sent := [0.0] * 4)
        for rank in (1,) if name == "send" else range(4):
            hosts.count(Call(name, payload, (0, 1, 2, 3), rank, root))
        assert hosts.bytes_out == [each * S for each in expected], sent
