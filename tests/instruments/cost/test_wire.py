"""Collectives among ranks of several hosts: against hand counting, NCCL's own forecast, and published figures."""

import math

import pytest

from scratch_ddp.instruments.cost import CLUSTERS, MODELS, Link, tokens_to_be_compute_bound, transfer_seconds
from scratch_ddp.instruments.cost.two_levels import card_loads, rounds_between, seconds_over_hosts
from scratch_ddp.instruments.cost.wire import NETWORK, NVLINK, PCIE, PRESETS, Wire

XXL, H100 = MODELS["XXL"], CLUSTERS["H100"]
S = 4800
BLOCKS, ALTERNATING = [0, 0, 1, 1], [0, 1, 0, 1]


def test_alpha_and_beta():
    assert transfer_seconds(0.5, 0.001, 3, 2000) == 3.5
    assert Link(0.5, 0.001).wire(2).all_reduce(1000) == 1.5  # two ranks send as many bytes as they sum
    assert Link(0.5, 0.001).wire(4).all_reduce(1000) == 2.0  # four: 2·3/4
    assert Link(0.5, 0.001, per_round=0.1).wire(4).all_reduce(1000) == pytest.approx(2.6)  # 6 rounds
    assert Link(0.5, 0.001).wire(1).all_reduce(1000) == 0
    assert Link(0.5, 0.001, per_round=0.25).wire(2).message(1000) == 1.75
    with pytest.raises(ValueError, match="1 rank or more, not 0"):
        Link(0, 0).wire(0)
    with pytest.raises(ValueError, match="beta must be a finite number, 0 or more, not nan"):
        Link(0, math.nan)


def nccl(rounds, between, nodes_log2=None):
    """Latency in µs as NCCL's tuning.cc adds it up: of a ring, or of a tree over so many nodes of eight."""
    if nodes_log2 is not None:
        return 8.4 + 2 * (7 * 3.4 + nodes_log2 * 14)
    return 8.4 + (rounds - between) * 3.4 + between * 14


def test_latencies_are_those_of_nccl():
    one, many = H100.wire(8), H100.wire(1024)
    assert one.all_gather(0) == pytest.approx(6.6e-6 + 7 * 0.6e-6)  # its protocol for small messages
    large = 10**9
    assert many.all_gather(large) - many.beta * large * 1023 / 1024 == pytest.approx(1e-6 * nccl(1023, 127), rel=0.01)
    assert many.alpha_of_all_reduce == pytest.approx(1e-6 * nccl(0, 0, 7))
    network = PRESETS["Ethernet 25 Gb"]
    assert network.wire(1024).alpha_of_all_reduce == pytest.approx(28.65e-3, rel=1e-3)
    assert network.wire(1024, trees=True).alpha_of_all_reduce == pytest.approx(0.29e-3, rel=0.01)
    for name, microseconds in {"Ethernet 100 Gb": 23, "NVLink 4": 10}.items():
        assert PRESETS[name].wire(4).all_reduce(1024) == pytest.approx(1e-6 * microseconds, rel=0.03)
        wire = PRESETS[name].wire(4)
        assert wire.all_reduce(2**24) == pytest.approx(wire.alpha_of_all_reduce + wire.beta_of_all_reduce * 2**24)


def test_a_ring_leaves_a_host_on_the_cards_of_all_its_members():
    gigabytes = {(n, apart): round(1e-9 / H100.wire(n, apart).beta) for n, apart in ((8, 1), (32, 1), (16, 2), (4, 8))}
    assert gigabytes == {(8, 1): 450, (32, 1): 400, (16, 2): 200, (4, 8): 50}  # nccl-tests: 32 H100 reach 366
    bandwidth_alone = 989e12 / 400e9 * 1023 / 1024
    assert 2 * XXL.block / 2 / 400e9 * 989e12 * 1023 / 1024 / XXL.block == pytest.approx(bandwidth_alone)
    assert bandwidth_alone == pytest.approx(2473, rel=0.02)
    assert 3500 < tokens_to_be_compute_bound(989e12, H100.wire(1024), XXL.block) < 4500
    free = Wire(Link(0, 1 / 450e9), Link(0, 1 / 50e9), 1024, 8)
    assert tokens_to_be_compute_bound(989e12, free, XXL.block) == pytest.approx(bandwidth_alone, abs=1)


def test_a_ring_has_no_barrier():
    """Two hosts of two ranks, 25 ms apart: four processes behind such a delay took 72 to 92 ms."""
    far = Link(0, 1e-9, per_round=0.025)
    cities = Wire(Link(0, 1e-10), far, 4, 2)
    assert cities.all_reduce(0) == pytest.approx(0.075) and cities.hierarchical_all_reduce(0) == pytest.approx(0.05)
    assert seconds_over_hosts(Link(0, 0), far, "all_reduce", 0, ALTERNATING, {}) == pytest.approx(0.15)
    assert seconds_over_hosts(Link(0, 0), far, "all_reduce", 0, BLOCKS, {}) == pytest.approx(0.075)
    for hosts in (2, 3, 5):
        for ranks in (1, 2, 3, 8):
            wire = Wire(Link(0, 0), Link(0, 0, per_round=1), hosts * ranks, ranks)
            order = [rank // ranks for rank in range(hosts * ranks)]
            assert wire.all_reduce(0) == rounds_between("all_reduce", order)
            assert wire.all_gather(0) == rounds_between("all_gather", order)


@pytest.mark.parametrize(
    ("call", "payload", "root", "blocks", "alternating"),
    [
        ("all_reduce", S, None, 1.5, 3.0),
        ("reduce_scatter", S, None, 0.75, 1.5),
        ("all_gather", S // 4, None, 0.75, 1.5),
        ("all_to_all", S, None, 1.0, 1.0),  # two ranks send two quarters each
        ("barrier", 0, None, 0, 0),
    ],
)
def test_bytes_that_leave_a_host(call, payload, root, blocks, alternating):
    for order, expected in ((BLOCKS, blocks), (ALTERNATING, alternating)):
        assert card_loads(call, payload, order, root) == dict.fromkeys((0, 1), (expected * S, expected * S))


def test_bytes_of_collectives_with_a_root():
    assert card_loads("broadcast", S, BLOCKS, 0) == {0: (S, 0), 1: (0, S)}
    assert card_loads("broadcast", S, BLOCKS, 1) == {0: (S, S), 1: (S, S)}  # 1, 2, 3, 0
    assert card_loads("gather", S, BLOCKS, 0) == {0: (0, 2 * S), 1: (2 * S, 0)}
    assert card_loads("scatter", S, BLOCKS, 3) == {0: (0, S // 2), 1: (S // 2, 0)}
    assert card_loads("all_reduce", S, [5, 5, 5]) == {}


def test_presets_have_one_latency_for_each_kind_of_link():
    for name, link in PRESETS.items():
        if link.small:
            assert (link.per_round, link.small[1]) in [each[:2] for each in (NVLINK, PCIE, NETWORK)], name
