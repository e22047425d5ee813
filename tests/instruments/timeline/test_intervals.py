"""Stretches of time: put together, cut, measured, against a clock that ticks."""

import random

import pytest

from scratch_ddp.instruments.intervals import total_seconds, union, without
from scratch_ddp.instruments.timeline import exposed_seconds


def test_exposed_communication_by_hand():
    backward = [(0.0, 10.0)]
    assert exposed_seconds(backward, [(2.0, 5.0)]) == 0
    assert exposed_seconds(backward, [(8.0, 13.0)]) == 3
    assert exposed_seconds([(0.0, 4.0), (6.0, 10.0)], [(3.0, 7.0)]) == 2
    assert exposed_seconds([], [(1.0, 2.0), (1.5, 4.0)]) == 3  # two messages at once count once
    assert exposed_seconds(backward, []) == 0


def test_union_and_what_is_left():
    assert union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert without([(0, 10)], [(2, 3), (5, 7), (9, 12)]) == [(0, 2), (3, 5), (7, 9)]
    assert without([(0, 2), (8, 9)], [(-1, 20)]) == []
    assert without([(0, 2)], []) == [(0, 2)]


@pytest.mark.parametrize("seed", range(20))
def test_against_ticks(seed):
    generator = random.Random(seed)

    def some():
        starts = [generator.randrange(50) for _ in range(generator.randrange(8))]
        return [(start, start + generator.randrange(12)) for start in starts]

    compute, communication = some(), some()

    def ticks(intervals):
        return {tick for start, end in intervals for tick in range(start, end)}

    assert total_seconds(communication) == len(ticks(communication))
    assert exposed_seconds(compute, communication) == len(ticks(communication) - ticks(compute))
    assert ticks(without(communication, compute)) == ticks(communication) - ticks(compute)
