"""The process group of rank cells carries everything that plain gloo carries, with the same values and errors."""

import datetime
import socket
import sys

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
        assert _same(plain[case], interruptible[case]), (rank, plain[case], interruptible[case])


def _same(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    return one == other


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
