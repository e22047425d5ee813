"""Collectives among ranks of several hosts: against hand counting and NCCL's own forecast."""

import pytest

from scratch_ddp.instruments.cost import CLUSTERS, Link


def test_alpha_and_beta():
    link = Link(0.5, 0.001, per_round=0.25)
    assert Link(0.5, 0.001).wire(2).all_reduce(1000) == 1.5  # two ranks send as many bytes as they sum
    assert Link(0.5, 0.001).wire(4).all_reduce(1000) == 2.0  # four: 2·3/4
    assert link.wire(4).all_reduce(1000) == link.seconds(1500, rounds=6) == 0.5 + 1.5 + 1.5
    assert link.wire(1).all_reduce(1000) == 0 and link.wire(2).message(1000) == 1.75
    both = Link(0.5, 0.001, per_round=0.1, small=(0.2, 0.01, 0))  # a protocol for small messages
    assert both.seconds(100, rounds=3) == pytest.approx(0.2 + 0.03 + 0.2) and both.seconds(2000) == 2.5


def test_latencies_are_those_of_nccl():
    """As its tuning.cc adds them up: per call 8.4 µs, on NVLink 3.4, on the network 14."""
    one, many = (CLUSTERS["H100"].wire(ranks) for ranks in (8, 1024))
    assert one.all_gather(0) == pytest.approx(6.6e-6 + 7 * 0.6e-6)  # its protocol for small messages
    ring = many.all_gather(10**9) - many.beta * 10**9 * 1023 / 1024
    assert ring == pytest.approx(1e-6 * (8.4 + (1023 - 127) * 3.4 + 127 * 14), rel=0.01)
    assert many.alpha_of_all_reduce == pytest.approx(1e-6 * (8.4 + 2 * (7 * 3.4 + 7 * 14)))  # a tree, 128 nodes
