"""A link in rank cells: Stop ends waits on it within seconds, and the same group goes on afterwards."""

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
CELLS = {
    "in a message": """
group.link = Link(100, 0)
sent = dist.isend(torch.ones(1), group=group, group_dst=(group.rank() + 1) % 4)
dist.recv(torch.ones(1), group=group, group_src=(group.rank() - 1) % 4)
""",
    "in native code": "group.link = Link(100, 0)\nmodel(torch.ones(1, 2)).sum().backward()",
    "on its way": """
import time
group.link = Link(100, 0)
work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
time.sleep(100)
""",
    "deadlock": "if rank == 0:\n    dist.all_reduce(torch.ones(1), group=group)",
    "deadlock in native code": "if rank == 0:\n    model(torch.ones(1, 2)).sum().backward()",
}


@pytest.fixture(params=["linked_group(Link(0.001, 0))", "lone_rank(4, Link(0.001, 0), rank)"], ids=["linked", "lone"])
def ranks(four_ranks, request):
    """Four linked ranks; or each stands for a rank of four, on a link of its own."""
    kept = "rank" if "linked" in request.param else "1.5"
    assert not four_ranks.run(_SET_UP.format(group=request.param, kept=kept)).error
    yield four_ranks


@pytest.mark.parametrize("cell", CELLS, ids=CELLS)
def test_stop(ranks, cell, request):
    """The next cell has the link for itself."""
    if "deadlock" in cell and "lone" in request.node.name:
        pytest.skip("nobody to wait for")
    said, seconds = ranks.stop(CELLS[cell])
    assert seconds < 3 and "All variables are kept" in said, said
    assert cell != "deadlock" or ("rank 0 waits in all_reduce" in said and "ranks 1–3 never came" in said)
    after = ranks.run(_AFTER)
    assert not after.error, after.traceback
    assert after.text().startswith("6 True True   ← ranks 0–3"), after.text()
