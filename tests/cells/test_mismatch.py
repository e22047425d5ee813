"""Ranks that wait for each other: who has called something else, in one group and in several, and who can't go on."""

from types import SimpleNamespace

from scratch_ddp.cells.kernel.diagnosis import stuck_ranks
from scratch_ddp.cells.kernel.rank_process import RankInCell
from scratch_ddp.cells.rank.interruptible_work import make_call
from tests.cells.cases import assert_next_works, stopped


def test_ranks_that_wait_in_groups_of_their_own_have_not_called_different_things(four_ranks):
    four_ranks.run("import time\npairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]\nx = torch.ones(2)")
    late = "if rank in (1, 3):\n    time.sleep(4)\n"
    code = f"{late}if rank < 2:\n    dist.all_reduce(x, group=pairs[0])\nelse:\n    dist.barrier(pairs[1])"
    message = stopped(four_ranks, code, after=2).message
    assert message.startswith("stopped: rank 0 waits in all_reduce (line 4); rank 2 waits in barrier (line 6); ranks 1")
    assert_next_works(four_ranks)


def test_two_ranks_that_wait_for_each_other_in_different_groups_are_stopped(four_ranks):
    four_ranks.run("pair = dist.new_group([0, 1])")
    message = four_ranks.run("dist.barrier(pair if rank == 1 else None)").message
    assert message.startswith("ranks 0, 2–3 called barrier; rank 1 called barrier in another group (line 1)")
    assert_next_works(four_ranks)


def in_cell(line=1, waits_in=None, calls=None, begun=None, raised=False, for_long=True):
    """A rank that has begun so many calls of each kind: {key: number} (see `interruptible_group.place`)."""
    process = SimpleNamespace(alive=True, place={"open": [], "begun": begun or {}}, calls=calls or {})
    rank = RankInCell(process)
    rank.said, rank.done, rank.error = {"line": line, "waits_in": waits_in}, raised, {"name": "E"} if raised else None
    rank.waits_since -= 60 * for_long
    return rank


def waiting(operation, ranks, peer="", begun=1, for_long=True, key="1"):
    """A rank that has `begun` so many calls of a kind and waits in the last of them."""
    call = make_call(operation, "0", key=key, position=begun - 1, ranks=ranks, peer=peer)
    return in_cell(1, call, {("0", 0): operation}, {key: begun}, for_long=for_long)


def test_ranks_are_stuck_that_wait_for_one_that_is_through_or_for_each_other():
    everyone = [0, 1, 2, 3]
    raised, works = in_cell(raised=True), in_cell()
    barrier = waiting("barrier", everyone, begun=1)
    assert stuck_ranks({0: barrier, 1: barrier, 2: barrier, 3: raised}) == [0, 1, 2]
    assert stuck_ranks({0: barrier, 1: barrier, 2: barrier, 3: in_cell(begun={"1": 1}, raised=True)}) == []
    assert stuck_ranks({0: barrier, 1: works, 2: barrier, 3: raised}) == [0, 2]
    broadcast = waiting("broadcast", everyone, begun=1)
    assert stuck_ranks({0: barrier, 1: broadcast, 2: barrier, 3: barrier}) == everyone  # as it may be across hosts
    chain = {0: waiting("recv", [1], " from rank 1", key="1>0"), 1: waiting("recv", [2], " from rank 2", key="2>1")}
    assert stuck_ranks({**chain, 2: raised}) == [0, 1]
    assert stuck_ranks({**chain, 2: works}) == []
    assert stuck_ranks({0: chain[0], 1: waiting("recv", [0], " from rank 0", key="0>1")}) == [0, 1]
    assert stuck_ranks({0: chain[0], 1: waiting("send", [0], " to rank 0", key="1>0")}) == []
    any_rank = waiting("recv", everyone, " from any rank", key="any")
    assert stuck_ranks({0: any_rank, 1: raised, 2: chain[0]}) == [0, 2]
    assert stuck_ranks({0: any_rank, 1: raised, 2: works}) == []


def test_ranks_that_need_nobody_else_are_not_stuck():
    trio = waiting("all_reduce", [0, 1, 2], begun=1)
    assert stuck_ranks({0: trio, 1: trio, 2: trio, 3: in_cell(raised=True)}) == []
    late = waiting("all_reduce", [0, 1, 2], begun=0, for_long=False)
    assert stuck_ranks({0: trio, 1: trio, 2: late, 3: in_cell(raised=True)}) == []
    assert stuck_ranks({0: waiting("a functional collective", None, begun=1), 1: in_cell(raised=True)}) == [0]
