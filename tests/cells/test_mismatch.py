"""Ranks that have called different things and wait for each other: told apart, in one group and in several."""

from scratch_ddp.cells.kernel.reports import RankState, describe_mismatch
from scratch_ddp.cells.rank.interruptible_work import make_call
from tests.cells.cases import assert_next_works, stopped


def test_different_collectives_in_one_place_are_told_apart(four_ranks):
    code = "if rank == 0:\n    dist.broadcast(torch.ones(2), 0)\nelse:\n    dist.all_reduce(torch.ones(2))"
    result = four_ranks.run(code)
    assert "rank 0 called broadcast of 2 × float32 from rank 0" in result.message
    assert "ranks 1–3 called all_reduce (SUM) of 2 × float32" in result.message
    assert_next_works(four_ranks)


def test_tensors_of_different_sizes_in_one_collective(four_ranks):
    result = four_ranks.run("dist.all_reduce(torch.ones(2 + rank // 2 * 1000))")
    assert "2 × float32" in result.message and "1002 × float32" in result.message
    assert "shape" in result.message


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


def test_a_rank_that_has_called_what_another_waits_in_will_be_with_it():
    """Rank 0 waits for all ranks; rank 1 is still in the pair's barrier, which rank 0 has called without waiting."""
    of_all = make_call("all_reduce", "0", number=7, given="2 × float32") | {"ranks": [0, 1]}
    of_pair = make_call("barrier", "3", number=2) | {"ranks": [0, 1]}
    waits = RankState("running", 4, of_all, {("3", 2): "barrier", ("0", 7): "all_reduce of 2 × float32"})
    comes = RankState("running", 3, of_pair, {("3", 2): "barrier"})
    assert describe_mismatch({0: waits, 1: comes}) == ""
    del waits.calls["3", 2]
    assert describe_mismatch({0: waits, 1: comes}).startswith(
        "rank 0 called all_reduce of 2 × float32; rank 1 called barrier in another group (line 4)"
    )
