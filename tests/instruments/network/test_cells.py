"""A link in rank cells: Stop ends waits on it within seconds, and the same group goes on afterwards."""

import time

import pytest

_SET_UP = """
from scratch_ddp.instruments.network import Link, linked_group, lone_rank
group = {group}
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
model(torch.ones(1, 2)).sum().backward()
kept = {kept}
"""
_AFTER = """
group.link = Link(0.001, 0)
began = len(group.transfers)
dist.all_reduce(x := torch.tensor([kept]), group=group)
sent = dist.isend(torch.ones(1), group=group, group_dst=(group.rank() + 1) % 4)
dist.recv(torch.ones(1), group=group, group_src=(group.rank() - 1) % 4)
sent.wait()
again = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
again(torch.ones(1, 2)).sum().backward()
since = group.transfers[began:]
print(int(x), len(since) > 3, max(each.ended - each.posted for each in since) < 1)
"""
IN_A_MESSAGE = """
group.link = Link(100, 0)
sent = dist.isend(torch.ones(1), group=group, group_dst=(group.rank() + 1) % 4)
dist.recv(torch.ones(1), group=group, group_src=(group.rank() - 1) % 4)
"""
ON_ITS_WAY = """
import time
group.link = Link(100, 0)
works = [dist.all_reduce(torch.ones(1), group=group, async_op=True) for _ in range(3)]
time.sleep(100)
"""
IN_NATIVE_CODE = "group.link = Link(100, 0)\nmodel(torch.ones(1, 2)).sum().backward()"
DEADLOCKED = "if rank == 0:\n    dist.all_reduce(torch.ones(1), group=group)"
DEADLOCKED_IN_NATIVE_CODE = "if rank == 0:\n    model(torch.ones(1, 2)).sum().backward()"
WITHOUT_PEERS = [IN_A_MESSAGE, ON_ITS_WAY, IN_NATIVE_CODE]


@pytest.fixture
def linked(four_ranks):
    assert not four_ranks.run(_SET_UP.format(group="linked_group(Link(0.001, 0))", kept="rank")).error
    yield four_ranks


@pytest.fixture
def lone(four_ranks):
    """Every rank stands for a rank of four, on a link of its own."""
    assert not four_ranks.run(_SET_UP.format(group="lone_rank(4, Link(0.001, 0), rank)", kept="1.5")).error
    yield four_ranks


def stop(kernel, cell) -> str:
    """Press Stop in a cell, see that it ends soon and that the next one has the link for itself; what Stop said."""
    running = kernel.start(cell)
    time.sleep(1.5)
    began = time.monotonic()
    kernel.interrupt()
    stopped = kernel.finish(running)
    assert time.monotonic() - began < 3
    assert stopped.error and "All variables are kept" in stopped.message, stopped.message
    after = kernel.run(_AFTER)
    assert not after.error, after.traceback
    assert after.text().startswith("6 True True   ← ranks 0–3"), after.text()
    return stopped.message


@pytest.mark.parametrize("cell", [*WITHOUT_PEERS, DEADLOCKED, DEADLOCKED_IN_NATIVE_CODE])
def test_stop(linked, cell):
    said = stop(linked, cell)
    if cell is DEADLOCKED:
        assert "rank 0 waits in all_reduce" in said and "ranks 1–3 never came" in said


@pytest.mark.parametrize("cell", WITHOUT_PEERS)
def test_stop_of_a_rank_without_peers(lone, cell):
    stop(lone, cell)


@pytest.mark.parametrize("ranks", ["linked", "lone"])
def test_stops_leave_no_thread_behind(ranks, request):
    kernel = request.getfixturevalue(ranks)
    for _ in range(4):
        running = kernel.start(IN_NATIVE_CODE)
        time.sleep(0.5)
        kernel.interrupt()
        assert "All variables are kept" in kernel.finish(running).message
    assert not kernel.run(_AFTER).error
    count = "import threading\nprint(sum(each.name == 'transfer-alarm' for each in threading.enumerate()))"
    assert kernel.run(count).text().startswith("0   ← ranks 0–3")
