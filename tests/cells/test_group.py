"""The process group of rank cells carries everything that plain gloo carries, with the same values and errors."""

import datetime
import socket
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from scratch_ddp.cells.rank import interruptible_group
from scratch_ddp.cells.rank.interruptible_work import Connections
from tests.cells.cases import on_interruptible_ranks
from tests.cells.group_cases import COLLECTIVES, run_cases
from tests.cells.group_users import USERS
from tests.ranks import run_ranks

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


def _lists_groups_while_another_thread_makes_some():
    made = []

    def make():
        limit = datetime.timedelta(seconds=5)
        made.extend(interruptible_group.InterruptibleGroup(dist.HashStore(), 0, 1, limit) for _ in range(40))

    maker = threading.Thread(target=make)
    sys.setswitchinterval(1e-6)
    maker.start()
    while maker.is_alive():
        assert interruptible_group.open_calls()["open"] == []
    return len(made)


def test_groups_can_be_listed_while_another_thread_makes_some():
    """A rank's control thread asks what is under way, whatever the cell does meanwhile."""
    assert run_ranks(1, _lists_groups_while_another_thread_makes_some, timeout=60) == [40]


def _sum_of_ones(group):
    ones = torch.ones(3)
    dist.all_reduce(ones, group=group)
    return ones[0].item()


def test_an_operation_that_does_not_notice_the_end_of_its_connection_keeps_nobody(monkeypatch):
    """As now and then a send of gloo's: nobody waits until the time limit of the group for it."""

    def renew():
        group = dist.new_group([0, 1])
        if dist.get_rank() == 0:
            stuck = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        else:
            stuck = dist.irecv(torch.ones(1), src=0, group=group)
        began = time.monotonic()
        interruptible_group.renew_groups(timeout=10)
        took = time.monotonic() - began
        return _sum_of_ones(group), stuck.is_completed(), took

    monkeypatch.setattr(Connections, "end", lambda self: None)
    for sums, ended, took in on_interruptible_ranks(2, renew):
        assert sums == 2 and not ended
        assert 1 <= took < 5


@pytest.mark.skipif(sys.platform == "darwin", reason="gloo's sockets can't be told from others there")
def test_a_connection_of_the_learners_own_that_is_made_meanwhile_outlives_the_group():
    def end_with_company():
        store, company = dist.PrefixStore("company", dist.distributed_c10d._get_default_store()), []

        def make():
            server = socket.create_server(("127.0.0.1", 0))
            company.extend([socket.create_connection(server.getsockname()), server.accept()[0]])
            return dist.ProcessGroupGloo(store, dist.get_rank(), 2, timeout=datetime.timedelta(seconds=60))

        connections = Connections(make)
        dist.barrier()
        work = connections.made.allreduce([torch.ones(1)]) if dist.get_rank() == 0 else None
        connections.end()
        if work is not None:
            with pytest.raises(RuntimeError):
                work.wait()
        company[0].sendall(b"still here")
        return company[1].recv(100)

    assert on_interruptible_ranks(2, end_with_company) == [b"still here"] * 2
