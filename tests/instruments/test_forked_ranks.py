"""Ranks for benchmarks and tests: how they meet, what they give back, how their ends are told."""

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.processes import alive, listening_beyond_loopback
from tests.ranks import RankFailed, run_ranks


@pytest.mark.parametrize("rendezvous", ["file", "tcp"])
def test_ranks_meet_and_listen_on_loopback_only(rendezvous):
    def sum_of_ranks():
        tensor = torch.tensor([dist.get_rank()])
        dist.all_reduce(tensor)
        listening = listening_beyond_loopback([os.getpid()]) if sys.platform == "linux" else []
        return tensor.item(), listening, os.getpid()

    results = run_ranks(3, sum_of_ranks, rendezvous=rendezvous)
    assert [(total, listening) for total, listening, _ in results] == [(3, [])] * 3
    assert not any(alive(pid) for _, _, pid in results)


def test_who_fails_is_named_and_nobody_stays():
    def fail():
        rank = dist.get_rank()
        if rank == 1:
            raise ZeroDivisionError("rank 1 divides")
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(30)

    began = time.monotonic()
    with pytest.raises(RankFailed) as failed:
        run_ranks(3, fail)
    assert time.monotonic() - began < 20
    assert "rank 1 divides" in failed.value.failures[1] and "exit code -9" in failed.value.failures[2]


def test_an_unknown_way_to_meet():
    with pytest.raises(ValueError, match="'file' or 'tcp', not 'env'"):
        run_ranks(2, list, rendezvous="env")
