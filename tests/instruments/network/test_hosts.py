"""Ranks of a host share its network card: the bytes that leave it, and what queues at it."""

import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from scratch_ddp import get
from scratch_ddp.instruments.cost import Wire
from scratch_ddp.instruments.cost.two_levels import CardLoad, seconds_over_hosts
from scratch_ddp.instruments.network import Link, linked_group, linked_mesh
from tests.ranks import RankFailed, run_ranks

SIZE = 2**18  # bytes
BETWEEN, INSIDE = Link(0.001, 2e-7, per_round=0.002), Link(0.001, 1e-8)


def hierarchical(tensor, mesh):
    local, host = get("pg", mesh["local"]), get("pg", mesh["host"])
    piece = torch.empty(tensor.numel() // local.size())
    dist.reduce_scatter_tensor(piece, tensor, group=local)
    dist.all_reduce(piece, group=host)
    dist.all_gather_into_tensor(tensor, piece, group=local)


def ring(tensor, group, order):
    """An all-reduce of messages, on a ring in this order of ranks."""
    n, place = len(order), order.index(dist.get_rank())
    after, before = order[(place + 1) % n], order[place - 1]
    parts, arriving = list(tensor.chunk(n)), torch.empty(tensor.numel() // n)
    for step in range(2 * n - 2):
        adds = step < n - 1
        sent, received = (place - step + (not adds) * n) % n, (place - step - 1) % n
        work = dist.isend(parts[sent], after, group=group)
        dist.recv(arriving, before, group=group)
        work.wait()
        parts[received].add_(arriving) if adds else parts[received].copy_(arriving)


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
        "messages in blocks": lambda tensor: ring(tensor, flat, [0, 1, 2, 3]),
        "messages, cyclic": lambda tensor: ring(tensor, flat, [0, 2, 1, 3]),
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
    expected = {
        "flat": (wire.all_reduce(SIZE), 1.5 * SIZE),
        "hierarchical": (wire.hierarchical_all_reduce(SIZE), SIZE),
        "cyclic": (
            seconds_over_hosts(INSIDE, BETWEEN, "all_reduce", 1.5 * SIZE, [0, 1, 0, 1], {0: cyclic, 1: cyclic}),
            3.0 * SIZE,
        ),
        "messages in blocks": (6 * (0.003 + SIZE / 4 * 2e-7), 1.5 * SIZE),
        "messages, cyclic": (6 * (0.003 + 2 * SIZE / 4 * 2e-7), 3.0 * SIZE),  # two share a card in each round
    }
    for name, (seconds, nbytes) in expected.items():
        rows = [each[name] for each in everyones]
        assert all(row[0] == [10.0] for row in rows)
        assert all(row[1] == {nbytes} for row in rows), name
        took = max(row[3] for row in rows) - min(row[2] for row in rows)
        # The calls between transfers take time, too.
        assert seconds - 1e-6 <= took < 1.3 * seconds, (name, took, seconds)


def at_once():
    """Both ranks of a host send to the other host at the same time; then each to its neighbour."""
    group, rank = linked_group(Link(0.001, 1e-6), hosts=2), dist.get_rank()
    for peer in ((rank + 2) % 4, rank ^ 1):
        dist.barrier()
        tensor = torch.zeros(5000)  # 20 ms
        (dist.send if rank < peer else dist.recv)(tensor, peer, group=group)
    return [(each.started, each.ended) for each in group.transfers], group.hosts.bytes_out


def test_messages_queue_at_the_card_and_not_inside():
    (first, out), (second, _), (third, _), (fourth, _) = run_ranks(4, at_once)
    assert out == [40_000, 0]
    for one, other in zip(first + second, third + fourth, strict=True):
        if one[1] - one[0] > 0.001:
            assert one == pytest.approx(other, abs=1e-6) and one[1] - one[0] == pytest.approx(0.021)
    earlier, later = sorted((first[0], second[0]))
    assert later[0] == pytest.approx(max(later[0], earlier[0] + 0.020), abs=1e-6)
    assert first[1][1] - first[1][0] == second[1][1] - second[1][0] == 0


def from_any_source():
    group = linked_group(Link(0.01, 0), hosts=2, inside=Link(0.002, 0))
    for source in (1, 2):
        if dist.get_rank() == source:
            dist.send(torch.zeros(1), 0, group=group)
        elif dist.get_rank() == 0:
            dist.recv(torch.zeros(1), group=group)
        dist.barrier()
    return [each.ended - each.started for each in group.transfers]


def test_a_receive_from_any_rank_takes_what_the_sender_takes():
    results = run_ranks(4, from_any_source)
    assert results[0] == pytest.approx([0.002, 0.01])
    assert results[1] == pytest.approx([0.002]) and results[2] == pytest.approx([0.01])


def sharded_steps():
    mesh = linked_mesh(Link(0, 1e-9), hosts=2)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False)
    fully_shard(model, mesh=mesh)
    hosts = get("pg", mesh["host"]).hosts
    dist.barrier()
    before = hosts.bytes_out
    model(torch.ones(2, 64)).sum().backward()
    dist.barrier()
    return [(after - earlier) / (64 * 64 * 4) for after, earlier in zip(hosts.bytes_out, before, strict=True)]


def test_hsdp_sends_a_model_out_of_each_host():
    assert run_ranks(4, sharded_steps)[3] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hosts": 3}, "4 ranks can't be shared evenly by 3 hosts"),
        ({"hosts": (0, 1)}, "a host's number, counted from 0, is needed for each of 4 ranks"),
        ({"hosts": (0, 0, 2, 2)}, "a host's number, counted from 0"),
        ({"hosts": "two"}, "hosts: a number, the host of each rank or another group's hosts are needed, not 'two'"),
        ({"inside": "NVLink 4"}, "hosts= is needed too"),
        ({"hosts": 2, "inside": "Token Ring"}, "no link 'Token Ring'"),
    ],
)
def test_hosts_that_do_not_fit_are_refused(options, says):
    def refused():
        with pytest.raises(ValueError, match=says):
            linked_group("Ethernet 10 Gb", **options)

    run_ranks(4, refused)


def test_ranks_that_disagree_are_told():
    def differ():
        linked_group("Ethernet 10 Gb", hosts=(0, 0, 1, 1) if dist.get_rank() else 2)

    with pytest.raises(RankFailed, match="the ranks give different hosts"):
        run_ranks(4, differ)


def test_a_mesh_needs_equal_hosts():
    def refused():
        with pytest.raises(ValueError, match="4 ranks can't be shared evenly by 3 hosts"):
            linked_mesh("Ethernet 10 Gb", hosts=3)
        mesh = linked_mesh("Ethernet 10 Gb", hosts=4, inside="NVLink 4")
        assert (get("ws", mesh["host"]), get("ws", mesh["local"])) == (4, 1)
        assert get("pg", mesh["host"]).inside.name == "NVLink 4"

    run_ranks(4, refused)
