"""Timing in turns: order, warm-up, the slowest rank."""

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from scratch_ddp.instruments.timing import Sample, interleaved, ratio
from tests.ranks import run_ranks


def test_every_variant_once_a_round_in_another_order_each_time_and_the_same_one_on_every_rank():
    def order_and_samples():
        order = []
        samples = interleaved({name: partial(order.append, name) for name in "abc"}, rounds=30, warm_up=1)
        return "".join(order), {name: len(taken) for name, taken in samples.items()}

    (order, samples), other = run_ranks(2, order_and_samples)
    rounds = [order[i : i + 3] for i in range(0, len(order), 3)]
    assert len(rounds) == 31 and {"".join(sorted(each)) for each in rounds} == {"abc"}
    assert len(set(rounds)) == 6  # all orders turn up
    assert samples == dict.fromkeys("abc", 30) and other == (order, samples)


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


@pytest.mark.parametrize("in_use", [False, True])
def test_a_gpu_is_waited_for_only_where_it_is_in_use(monkeypatch, in_use):
    """Ranks that compute on the CPU of a machine with GPUs must not take one into use in what is timed."""
    waited = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(True))
    interleaved({"nothing": list}, rounds=2, warm_up=0)
    assert waited == [True] * 2 * in_use
