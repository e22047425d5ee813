"""Timing in turns: order, warm-up, the slowest rank."""

import time

import pytest
import torch.distributed as dist
from ranks import run_ranks

from scratch_ddp.benchmark.timing import Sample, interleaved, ratio


def test_every_variant_once_a_round_and_another_first_each_time():
    order = []
    samples = interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=4, warm_up=1)
    assert order == ["b", "a", "a", "b", "b", "a", "a", "b", "b", "a"]
    assert {name: len(taken) for name, taken in samples.items()} == {"a": 4, "b": 4}


@pytest.mark.parametrize("rendezvous", ["file", "tcp"])
def test_the_slowest_rank_counts_on_every_rank(rendezvous):
    def measure():
        busy, idle = (lambda: sum(range(2_000_000))), (lambda: time.sleep(0.05))
        rank = dist.get_rank()
        return interleaved({"work": busy if rank == 1 else list, "sleep": idle if rank == 0 else list}, rounds=3)

    here, there = run_ranks(2, measure, rendezvous=rendezvous)
    assert here == there
    assert all(sample.wall >= 0.05 and sample.cpu < 0.05 for sample in here["sleep"])
    assert all(sample.cpu > 0.002 for sample in here["work"])


def test_ratios_are_taken_round_by_round():
    slow, fast = [Sample(2.0, 6.0), Sample(40.0, 3.0)], [Sample(1.0, 1.0), Sample(10.0, 1.0)]
    assert ratio(slow, fast).median == 3.0
    assert ratio(slow, fast, "cpu").median == 4.5


def test_nothing_to_time():
    with pytest.raises(ValueError, match="0 variants"):
        interleaved({})
