"""A link in rank cells: Stop ends waits on it within seconds, and the same group goes on afterwards."""

import time

import pytest

_SET_UP = """
from scratch_ddp.link import Link, linked_group
group = linked_group(Link(0.001, 0))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
model(torch.ones(1, 2)).sum().backward()
kept = rank
"""
_AFTER = """
group.link = Link(0.001, 0)
began = len(group.transfers)
dist.all_reduce(x := torch.tensor([kept]), group=group)
last = group.transfers[-1]
again = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
again(torch.ones(1, 2)).sum().backward()
print(x.item(), len(group.transfers) - began > 1, last.ended - last.posted < 1)
"""
SLEEPING = "group.link = Link(100, 0)\ndist.all_reduce(torch.ones(1), group=group)"
DEADLOCKED = "if rank == 0:\n    dist.all_reduce(torch.ones(1), group=group)"
IN_NATIVE_CODE = "group.link = Link(100, 0)\nmodel(torch.ones(1, 2)).sum().backward()"
DEADLOCKED_IN_NATIVE_CODE = "if rank == 0:\n    model(torch.ones(1, 2)).sum().backward()"


@pytest.fixture
def linked(four_ranks):
    assert not four_ranks.run(_SET_UP).error
    yield four_ranks


@pytest.mark.parametrize("cell", [SLEEPING, DEADLOCKED, IN_NATIVE_CODE, DEADLOCKED_IN_NATIVE_CODE])
def test_stop(linked, cell):
    running = linked.start(cell)
    time.sleep(1.5)
    began = time.monotonic()
    linked.interrupt()
    stopped = linked.finish(running)
    assert time.monotonic() - began < 3
    assert stopped.error and "All variables are kept" in stopped.message, stopped.message
    if cell is DEADLOCKED:
        assert "rank 0 waits in all_reduce" in stopped.message and "ranks 1–3 never came" in stopped.message
    after = linked.run(_AFTER)
    assert not after.error, after.traceback
    assert after.text().startswith("6 True True   ← ranks 0–3")


def test_stops_leave_no_thread_behind(linked):
    for _ in range(4):
        running = linked.start(IN_NATIVE_CODE)
        time.sleep(0.5)
        linked.interrupt()
        assert "All variables are kept" in linked.finish(running).message
    assert not linked.run(_AFTER).error
    count = "import threading\nprint(sum(each.name == 'rings-at-transfers-ends' for each in threading.enumerate()))"
    assert linked.run(count).text().startswith("0   ← ranks 0–3")
