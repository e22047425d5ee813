"""A link in rank cells: Stop ends waits on it, and the same group goes on afterwards."""

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
print(int(x), len(since) > 3, max(each.ended - each.posted for each in since) < 50)
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


LINKED, LONE = "linked_group(Link(0.001, 0))", "lone_rank(4, Link(0.001, 0), rank)"  # each on a link of its own
CASES = [(LINKED, cell) for cell in CELLS] + [(LONE, cell) for cell in CELLS if "deadlock" not in cell]


@pytest.mark.parametrize(("group", "cell"), CASES)
def test_stop(four_ranks, group, cell):
    """The next cell has the link for itself."""
    assert not four_ranks.run(_SET_UP.format(group=group, kept="rank" if group is LINKED else "1.5")).error
    said, _ = four_ranks.stop(CELLS[cell])
    assert "All variables are kept" in said, said  # so all ranks have noticed it within seconds
    assert cell != "deadlock" or ("rank 0 waits in all_reduce" in said and "ranks 1–3 never came" in said)
    after = four_ranks.run(_AFTER)
    assert not after.error, after.traceback
    assert after.text().startswith("6 True True   ← ranks 0–3"), after.text()
