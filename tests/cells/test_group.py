"""The process group of rank cells carries everything that plain gloo carries, with the same values and errors."""

import collections
import datetime
import os
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from scratch_ddp.cells.rank import interruptible_group, interruptible_work
from tests.cells.cases import on_interruptible_ranks
from tests.cells.group_cases import COLLECTIVES, run_cases
from tests.cells.group_users import USERS
from tests.ranks import RankFailed, run_ranks

CASES = [*COLLECTIVES, *USERS]


@pytest.fixture(scope="module")
def both():
    """{backend: [what rank 0 got in each case, rank 1, …]}"""
    backends = ("gloo", interruptible_group.BACKEND)
    return {backend: run_ranks(4, run_cases, CASES, backend=backend, timeout=100) for backend in backends}


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_gives_what_plain_gloo_gives(both, case):
    for rank, (plain, interruptible) in enumerate(zip(both["gloo"], both[interruptible_group.BACKEND], strict=True)):
        assert not isinstance(plain[case], str), f"the case itself is wrong: {plain[case]}"
        assert _same(plain[case], interruptible[case]), (
            f"rank {rank}: gloo gave {plain[case]}, not {interruptible[case]}"
        )


def _same(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    return one == other


def test_wait_with_a_time_limit_raises_and_names_the_operation():
    def impatient():
        tensor = torch.ones(2)
        if dist.get_rank() == 0:
            work = dist.all_reduce(tensor, async_op=True)
            with pytest.raises(RuntimeError, match="all_reduce: not finished after 0.2 s"):
                work.wait(datetime.timedelta(seconds=0.2))
            dist.barrier(group=other)
            work.wait()
        else:
            dist.barrier(group=other)
            dist.all_reduce(tensor)
        return tensor.tolist()

    def with_group():
        global other
        other = dist.new_group([0, 1])
        return impatient()

    assert on_interruptible_ranks(2, with_group) == [[2, 2]] * 2


def test_a_peer_that_dies_is_gloos_error_in_the_waiting_rank():
    def outlive():
        if dist.get_rank() == 1:
            os._exit(0)
        with pytest.raises(RuntimeError, match="closed by peer|reset by peer|Connection"):
            dist.all_reduce(torch.ones(1))
        raise ValueError("rank 0 went on")

    with pytest.raises(RankFailed) as failed:
        on_interruptible_ranks(2, outlive)
    assert "rank 0 went on" in failed.value.failures[0]


def test_waits_can_be_freed_while_another_thread_begins_some():
    kept, ended = collections.deque(maxlen=1000), threading.Event()

    def begin():
        while not ended.is_set():
            kept.append(torch.futures.Future())
            interruptible_work.free_too(kept[-1])

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=begin)
    thread.start()
    try:
        for _ in range(300):
            interruptible_work.free_waiting_futures()
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(before)


def _lists_groups_while_another_thread_makes_some():
    made = []

    def make():
        limit = datetime.timedelta(seconds=5)
        made.extend(interruptible_group.InterruptibleGroup(dist.HashStore(), 0, 1, limit) for _ in range(200))

    maker = threading.Thread(target=make)
    sys.setswitchinterval(1e-6)
    maker.start()
    while maker.is_alive():
        assert interruptible_group.open_calls()["open"] == []
    return len(made)


def test_groups_can_be_listed_while_another_thread_makes_some():
    """A rank's control thread asks what is under way, whatever the cell does meanwhile."""
    assert run_ranks(1, _lists_groups_while_another_thread_makes_some, timeout=60) == [200]
