"""Collectives among ranks of several hosts: against hand counting, NCCL's own forecast, and published figures."""

import math

import pytest

from scratch_ddp.instruments.cost import CLUSTERS, MODELS, Link, tokens_to_be_compute_bound
from scratch_ddp.instruments.cost.wire import PRESETS, Wire

XXL, H100 = MODELS["XXL"], CLUSTERS["H100"]


def test_alpha_and_beta():
    link = Link(0.5, 0.001, per_round=0.25)
    assert Link(0.5, 0.001).wire(2).all_reduce(1000) == 1.5  # two ranks send as many bytes as they sum
    assert Link(0.5, 0.001).wire(4).all_reduce(1000) == 2.0  # four: 2·3/4
    assert link.wire(4).all_reduce(1000) == link.seconds(1500, rounds=6) == 0.5 + 1.5 + 1.5
    assert link.wire(1).all_reduce(1000) == 0 and link.wire(2).message(1000) == 1.75
    both = Link(0.5, 0.001, per_round=0.1, small=(0.2, 0.01, 0))  # a protocol for small messages
    assert both.seconds(100, rounds=3) == pytest.approx(0.2 + 0.03 + 0.2) and both.seconds(2000) == 2.5


def test_presets():
    for name, link in PRESETS.items():
        assert link.name == name and 1e8 <= 1 / link.beta <= 1e12 and 0 < link.alpha < 1e-3
        assert not name.startswith("Ethernet") or name == f"Ethernet {round(8e-9 / link.beta)} Gb"
    assert str(Link(145e-6, 1e-9 / 4, "T4")) == "T4: 145 µs per call, 4 GB/s"


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


def test_a_ring_leaves_a_host_on_the_cards_of_all_its_members():
    gigabytes = {(n, apart): round(1e-9 / H100.wire(n, apart).beta) for n, apart in ((8, 1), (32, 1), (16, 2), (4, 8))}
    assert gigabytes == {(8, 1): 450, (32, 1): 400, (16, 2): 200, (4, 8): 50}  # nccl-tests: 32 H100 reach 366
    assert 3500 < tokens_to_be_compute_bound(989e12, H100.wire(1024), XXL.block) < 4500
    free = Wire(Link(0, 1 / 450e9), Link(0, 1 / 50e9), 1024, 8)
    assert tokens_to_be_compute_bound(989e12, free, XXL.block) == math.ceil(989e12 / 400e9 * 1023 / 1024)


def test_a_ring_has_no_barrier():
    """Two hosts of two ranks, 25 ms apart: four processes behind such a delay took 72 to 92 ms."""
    assert Wire(Link(0, 1e-10), Link(0, 1e-9, per_round=0.025), 4, 2).all_reduce(0) == pytest.approx(0.075)
