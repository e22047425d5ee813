"""Ranks on two hosts: what holds for cells on one machine holds for them."""

import subprocess

import pytest

from tests.cells.cases import assert_next_works, stopped
from tests.cells.hosts import JOIN, HostsOfKernel
from tests.cells.test_output import (  # noqa: F401  these run here as well
    test_a_cell_ends_though_a_process_that_it_leaves_behind_writes_without_end,
    test_late_output_says_whose_it_is,
    test_twenty_runs_give_one_text,
)
from tests.cells.test_stop import test_a_loop_ends_in_the_same_step_on_all_ranks  # noqa: F401
from tests.kernel import wait_until_gone


@pytest.fixture(scope="module")
def hosts(_shared_kernel):
    started = HostsOfKernel(_shared_kernel)
    yield started
    _shared_kernel.run("%dist_shutdown")
    started.end()


@pytest.fixture
def four_ranks(hosts):
    """The kernel, whose ranks 0–1 are on one host and 2–3 on the other."""
    if not hosts.agents or hosts.kernel.run("%%rank [0]\npass").error:
        hosts.end()
        hosts.kernel.run("%dist_reset")
        hosts.init()
    return hosts.kernel


def test_hosts_join_and_the_ticket_is_used_once(hosts, four_ranks):
    told = hosts.told
    assert "(127.0.0.2, no GPU) has joined" in told and "(127.0.0.3, no GPU) has joined" in told
    assert "Ranks 0–3 ready, over gloo: ranks 0–1 on" in told and "ranks 2–3 on" in told
    used = subprocess.run(JOIN, input=hosts.ticket, capture_output=True, text=True, timeout=30)
    assert used.returncode == 1 and "the ticket has been used" in used.stdout and not used.stderr
    assert four_ranks.run("dist.all_reduce(x := torch.tensor([rank])); x.item()").text() == "6   ← ranks 0–3\n"


def test_each_rank_knows_its_place(four_ranks):
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    code = f"import os\nprint(*(os.environ[name] for name in {names}))"
    lines = [f"{rank} 4 {rank % 2} 2   ← rank {rank}" for rank in range(4)]
    assert four_ranks.run(code).text().splitlines() == lines
    told = four_ranks.run("%dist_status").text()
    assert told.count("(127.0.0.2)   process") == told.count("(127.0.0.3)   process") == 2


def test_ranks_of_two_hosts_that_call_different_things_are_told(four_ranks):
    result = four_ranks.run("dist.all_reduce(torch.ones(4)) if rank < 2 else dist.broadcast(torch.ones(4), 0)")
    assert "ranks 0–1 called all_reduce (SUM) of 4 × float32" in result.message and "ranks 2–3 called" in result.message
    assert_next_works(four_ranks)


def test_a_rank_that_can_not_be_freed_is_replaced_on_its_host(four_ranks):
    four_ranks.run("kept = rank")
    result = stopped(four_ranks, "import ctypes\nif rank == 3:\n    ctypes.PyDLL(None).sleep(30)")
    assert "Rank 3 could not be freed and was replaced" in result.message
    assert four_ranks.run("print('kept' in globals())").text() == "True   ← ranks 0–2\nFalse   ← rank 3\n"
    assert_next_works(four_ranks)


def test_a_rank_that_crashes_is_named_and_shutdown_leaves_nothing(hosts, four_ranks):
    code = "import ctypes\nif rank == 3:\n    print('last words')\n    ctypes.string_at(0)\ndist.barrier()"
    result = four_ranks.run(code)
    assert "rank 3 was ended by SIGSEGV" in result.message and "in line 4 of the cell" in result.message
    assert "── last output of rank 3 ──\nlast words" in result.traceback
    family = hosts.family()
    assert four_ranks.run("%dist_shutdown").text() == "Ranks 0–3 ended.\n"
    wait_until_gone(family, 10)
    for agent in hosts.agents:
        status, text = agent.finish()
        assert status == 0 and "the notebook has let this host go" in text
    assert "Ranks 0–1 ready" in four_ranks.run("%dist_init -n 2").text()  # here, after a cluster of other hosts
    four_ranks.run("%dist_shutdown")
