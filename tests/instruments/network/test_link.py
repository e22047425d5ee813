"""Links, presets and linked groups: what they are made of, what they carry and refuse, what they leave behind."""

import os
import tempfile
import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from scratch_ddp import get
from scratch_ddp.instruments.cost import Wire
from scratch_ddp.instruments.cost.two_levels import CardLoad, seconds_over_hosts
from scratch_ddp.instruments.network import PRESETS, Link, linked_group, linked_mesh, lone_rank
from tests.cells.group_cases import COLLECTIVES, run_cases
from tests.cells.group_users import USERS
from tests.ranks import RankFailed, run_ranks


@pytest.fixture
def no_group_left():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_seconds():
    link = Link(0.5, 0.001, per_round=0.1)
    assert link.seconds(2000) == 2.5 and link.seconds(2000, rounds=3) == pytest.approx(2.8)
    assert link.wire(4).all_reduce(1000) == pytest.approx(link.seconds(1500, rounds=6))
    both = Link(0.5, 0.001, per_round=0.1, small=(0.2, 0.01, 0))  # a protocol for small messages
    assert both.seconds(100, rounds=3) == pytest.approx(0.2 + 0.03 + 0.2) and both.seconds(2000) == 2.5
    assert str(Link(145e-6, 1e-9 / 4, "T4")) == "T4: 145 µs per call, 4 GB/s"
    assert str(Link(0, 0)) == "link: 0 µs per call, any number of bytes at once"


def test_every_preset_has_a_source_and_a_speed():
    for name, link in PRESETS.items():
        assert link.name == name and len(link.source) > 20
        assert 1e8 <= 1 / link.beta <= 1e12 and 0 < link.alpha < 1e-3
    gigabit = {name: 8e-9 / link.beta for name, link in PRESETS.items() if name.startswith("Ethernet")}
    assert all(name == f"Ethernet {round(speed)} Gb" for name, speed in gigabit.items())
    assert {"T4 over PCIe", "NVLink 4", "InfiniBand NDR", "Ethernet 10 Gb"} <= set(PRESETS)


def test_a_lone_rank_is_the_default_group_where_there_is_none(no_group_left):
    group = lone_rank(64, "Ethernet 10 Gb", rank=7)
    assert (dist.get_rank(), dist.get_world_size(), dist.group.WORLD) == (7, 64, group)
    further = lone_rank(4, None, rank=2)
    assert (dist.get_rank(further), dist.get_world_size(further)) == (2, 4)
    assert dist.get_process_group_ranks(further) == [0, 1, 7, 2]  # 7 is this process
    x = torch.ones(2)
    dist.broadcast(x, group=further, group_src=3)
    dist.destroy_process_group(further)
    pair = dist.new_group([1, 7])
    dist.all_reduce(x, group=pair)
    assert x.tolist() == [2, 2] and pair.link == group.link and dist.get_rank(pair) == 1
    dist.destroy_process_group()
    assert not dist.is_initialized()


def test_the_link_is_switched_in_a_line(no_group_left):
    group, x = lone_rank(2, Link(1e-4, 0, "first")), torch.ones(1)
    dist.all_reduce(x)
    group.link = None
    dist.all_reduce(x)
    group.link = "Ethernet 10 Gb"
    dist.all_reduce(x)
    assert group.link is PRESETS["Ethernet 10 Gb"] and x.item() == 8
    assert [transfer.ended - transfer.started for transfer in group.transfers] == pytest.approx(
        [1e-4, group.link.seconds(4, 2)], rel=1e-3
    )
    with pytest.raises(ValueError, match="no link 'Ethernet'; there are"):
        group.link = "Ethernet"
    with pytest.raises(TypeError, match="a Link, the name of a preset or None is needed, not float"):
        group.link = 1e-9
    assert group.link is PRESETS["Ethernet 10 Gb"]


def test_what_is_refused():
    def refused():
        rank = dist.get_rank()
        pair, linked = dist.new_group([0, 1]), linked_group(None)
        messages = []
        for link, group, hosts in (
            ("Token Ring", None, None),
            (1.0, None, None),
            (None, linked, None),
            (None, None, 2),
            (None, None, (0, 1)),
        ):
            with pytest.raises((ValueError, TypeError)) as raised:
                linked_group(link, group, hosts=hosts)
            messages.append(str(raised.value))
        if rank == 2:
            with pytest.raises(ValueError, match="rank 2 is not in the group"):
                linked_group(None, pair)
        else:
            linked_group(None, pair)
        return messages

    for unknown, no_link, twice, uneven, few in run_ranks(3, refused):
        assert unknown.startswith("there is no link 'Token Ring'; there are 'T4 over PCIe', ")
        assert no_link.startswith("a Link, the name of a preset or None is needed, not float")
        assert twice == "this group is on a link already: set its .link"
        assert uneven == "3 ranks can't be shared evenly by 2 hosts"
        assert few == "hosts=(0, 1): the number of a host is needed for each of 3 ranks"
    with pytest.raises(RuntimeError, match="no process group whose ranks could be linked"):
        linked_group("NVLink 4")
    with pytest.raises(ValueError, match="rank must be one of 0 to 3, not 4"):
        lone_rank(4, "NVLink 4", 4)


@pytest.mark.parametrize("whole", [True, False])
def test_what_is_destroyed_is_gone(whole, tmp_path):
    def made_and_destroyed():
        tempfile.tempdir = str(tmp_path)
        world = dist.distributed_c10d._world
        before = len(world.pg_map), len(world.pg_names), len(world.tags_to_pg[""])
        linked = linked_group("NVLink 4", None if whole else dist.group.WORLD)
        dist.all_reduce(torch.ones(1), group=linked)
        dist.destroy_process_group(linked)
        assert (len(world.pg_map), len(world.pg_names), len(world.tags_to_pg[""])) == before
        x = torch.ones(1)
        dist.all_reduce(x)
        again = linked_group("NVLink 4")
        dist.all_reduce(x, group=again)
        dist.barrier()
        return x.item()

    assert run_ranks(2, made_and_destroyed) == [4, 4]
    assert list(tmp_path.iterdir()) == []


CASES = [case for case in [*COLLECTIVES, *USERS] if case.__name__ not in ("sub_groups", "plain_gloo_sub_group")]


def on_a_link():
    """The cases use the default group, so the linked one takes its place."""
    group = linked_group(Link(alpha=1e-5, beta=1e-10))
    dist.distributed_c10d._update_default_pg(group)
    found = {}
    for case in CASES:
        group.transfers.clear()
        found |= run_cases([case])
        found[case.__name__] = found[case.__name__], len(group.transfers)
    return found


@pytest.fixture(scope="module")
def both():
    plain = run_ranks(4, run_cases, CASES, timeout=100)
    return list(zip(plain, run_ranks(4, on_a_link, timeout=100), strict=True))


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_gives_what_plain_gloo_gives(both, case):
    for rank, (plain, linked) in enumerate(both):
        assert not isinstance(plain[case], str), f"the case itself is wrong: {plain[case]}"
        value, transfers = linked[case]
        assert same(plain[case], value), f"rank {rank}: gloo gave {plain[case]}, the link {value}"
        assert transfers or case == "meshes"  # which makes groups of its own


def same(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return one == other


def test_a_rank_that_dies_is_gloos_error():
    def outlive():
        linked = linked_group(Link(0.001, 0))
        if dist.get_rank() == 1:
            os._exit(0)
        with pytest.raises(RuntimeError, match="closed by peer|reset by peer|Connection"):
            dist.all_reduce(torch.ones(1), group=linked)
        raise ValueError("rank 0 went on")

    with pytest.raises(RankFailed) as failed:
        run_ranks(2, outlive)
    assert "rank 0 went on" in failed.value.failures[0]


SIZE = 2**18  # bytes
BETWEEN, INSIDE = Link(0.001, 2e-7, per_round=0.002), Link(0.001, 1e-8)


def hierarchical(tensor, mesh):
    local, host = get("pg", mesh["local"]), get("pg", mesh["host"])
    piece = torch.empty(tensor.numel() // local.size())
    dist.reduce_scatter_tensor(piece, tensor, group=local)
    dist.all_reduce(piece, group=host)
    dist.all_gather_into_tensor(tensor, piece, group=local)


def all_reduces():
    """For each way: this rank's sums, bytes that left each host, and from the first begin to the last end."""
    warnings.simplefilter("ignore")
    mesh = linked_mesh(BETWEEN, hosts=2, inside=INSIDE)
    hosts = get("pg", mesh["host"]).hosts
    flat = linked_group(BETWEEN, hosts=hosts, inside=INSIDE)
    cyclic = linked_group(BETWEEN, hosts=(0, 1, 0, 1), inside=INSIDE)
    groups = [flat, cyclic, get("pg", mesh["host"]), get("pg", mesh["local"])]
    ways = {
        "flat": lambda tensor: dist.all_reduce(tensor, group=flat),
        "hierarchical": lambda tensor: hierarchical(tensor, mesh),
        "cyclic": lambda tensor: dist.all_reduce(tensor, group=cyclic),
    }
    results = {}
    for name, way in ways.items():
        for group in groups:
            group.transfers.clear()
        tensor, before = torch.full((SIZE // 4,), 1.0 + dist.get_rank()), [*hosts.bytes_out, *cyclic.hosts.bytes_out]
        dist.barrier()
        way(tensor)
        dist.barrier()
        now = [*hosts.bytes_out, *cyclic.hosts.bytes_out]
        spans = [(each.started, each.ended) for group in groups for each in group.transfers]
        sent = {later - earlier for later, earlier in zip(now, before, strict=True)} - {0}
        results[name] = tensor.unique().tolist(), sent, min(spans)[0], max(end for _, end in spans)
    return results


@pytest.mark.measures_time
def test_all_reduces_take_as_long_as_forecast():
    everyones = run_ranks(4, all_reduces)
    wire = Wire(INSIDE, replace(BETWEEN, beta=2 * BETWEEN.beta), 4, 2)  # two ranks share a card
    cyclic = CardLoad(3 * SIZE, 3 * SIZE)
    slow = seconds_over_hosts(INSIDE, BETWEEN, "all_reduce", 1.5 * SIZE, [0, 1, 0, 1], {0: cyclic, 1: cyclic})
    expected = {
        "flat": (wire.all_reduce(SIZE), 1.5 * SIZE),
        "hierarchical": (wire.hierarchical_all_reduce(SIZE), SIZE),
        "cyclic": (slow, 3.0 * SIZE),
    }
    for name, (seconds, nbytes) in expected.items():
        rows = [each[name] for each in everyones]
        assert all(row[0] == [10.0] for row in rows)
        assert all(row[1] == {nbytes} for row in rows), name
        took = max(row[3] for row in rows) - min(row[2] for row in rows)
        # The calls between transfers take time, too.
        assert seconds - 1e-6 <= took < 1.3 * seconds, (name, took, seconds)
