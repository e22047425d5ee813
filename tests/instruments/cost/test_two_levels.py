"""What leaves a host, counted by hand; and the seconds that this takes where the host has one card."""

import pytest

from scratch_ddp.instruments.cost import TwoLevels, Wire
from scratch_ddp.instruments.cost.two_levels import card_loads

S = 4800
BLOCKS, ALTERNATING = [0, 0, 1, 1], [0, 1, 0, 1]


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


@pytest.fixture
def two_hosts():
    """Two hosts of two ranks: inside ten times as fast."""
    return TwoLevels(Wire(0.001, 1e-6, 2, 0.0001), Wire(0.01, 1e-5, 2, 0.002))


def test_an_all_reduce_flat_hierarchical_and_alternating(two_hosts):
    flat, alternating = two_hosts.flat("all_reduce", S), two_hosts.flat("all_reduce", S, alternating=True)
    assert flat == pytest.approx((0.01 + 6 * 0.002 + 1.5 * S * 1e-5, 1.5 * S))
    assert alternating == pytest.approx((0.01 + 6 * 0.002 + 3.0 * S * 1e-5, 3.0 * S))
    inside = 0.001 + 0.0001 + S / 2 * 1e-6
    expected = (2 * inside + 0.01 + 2 * 0.002 + S * 1e-5, S)
    assert two_hosts.hierarchical_all_reduce(S) == pytest.approx(expected)


def test_fsdp_and_hsdp(two_hosts):
    assert two_hosts.fsdp(S).out_of_host == 2.25 * S and two_hosts.hsdp(S).out_of_host == S
    assert two_hosts.hsdp(S).seconds == pytest.approx(two_hosts.hierarchical_all_reduce(S).seconds + 0.0011 + S / 2e6)


def test_more_hosts_and_ranks():
    many = TwoLevels(Wire(0, 0, 8), Wire(0, 1.0, 4))
    assert many.hierarchical_all_reduce(3200).out_of_host == 2 * 3 / 4 * 3200
    assert many.flat("all_reduce", 3200).out_of_host == 2 * 31 / 32 * 3200
    assert many.flat("all_reduce", 3200, alternating=True).out_of_host == 8 * 2 * 31 / 32 * 3200
    alone = TwoLevels(Wire(0.5, 0, 1), Wire(0.5, 1.0, 1))
    assert alone.flat("all_reduce", 3200) == (0, 0)
