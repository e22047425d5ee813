"""Worlds of several ranks in one process do what a process group does, and say what went wrong in them."""

import torch
import torch.distributed as dist

from scratch_ddp.course.inputs.one_process import World
from tests.ranks import run_ranks


def play(act, *given):
    def on_rank():
        world = World(act, list(given))
        assert dist.get_world_size() == 1  # the default group is the rank's own again
        return world.complaint, world.results, world.printed, [counts.calls for counts in world.counts]

    return run_ranks(1, on_rank)[0]


def test_collectives_and_messages():
    def act(number):
        rank, n = dist.get_rank(), dist.get_world_size()
        total, most, texts = torch.tensor([number]), torch.tensor(number), [None] * n
        dist.all_reduce(total)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        dist.all_gather_object(texts, f"rank {rank}")
        dist.broadcast(most, 1)
        gathered = [None] * n if rank == 2 else None
        dist.gather_object(rank * 10, gathered, dst=2)
        scattered = [None]
        dist.scatter_object_list(scattered, gathered, src=2)
        assert scattered == [rank * 10]
        passed = torch.empty(1, dtype=torch.int64)
        work = dist.isend(torch.tensor([rank]), (rank + 1) % n)
        dist.recv(passed, (rank - 1) % n)
        work.wait()
        print(*texts)
        return total.item(), most.item(), passed.item()

    complaint, results, printed, calls = play(act, (1,), (5,), (3,))
    assert (complaint, results) == ("", [(9, 5, 2), (9, 5, 0), (9, 5, 1)])
    assert printed == ["rank 0 rank 1 rank 2\n"] * 3
    for_objects = {"gather": 1, "scatter": 2}  # beside an all-gather and a broadcast of their sizes
    assert calls[0] == {"all_reduce": 2, "all_gather": 3, "broadcast": 2, "send": 1, "recv": 1} | for_objects


def test_what_goes_wrong_is_said():
    def only_rank_0():
        if dist.get_rank() == 0:
            dist.barrier()

    def different_sizes():
        dist.all_reduce(torch.zeros(dist.get_rank() + 1))

    def unreceived():
        if dist.get_rank() == 0:
            dist.send(torch.zeros(1), 1)

    def no_modulo():
        dist.send(torch.zeros(1), dist.get_rank() + 1)

    assert play(only_rank_0, (), ())[0] == "rank 0 would wait for ever"
    complaint = play(different_sizes, (), ())[0]
    assert "rank 0 calls all_reduce of 1 × float32, rank 1 calls all_reduce of 2 × float32" in complaint
    assert play(unreceived, (), ())[0] == "rank 0 sends to rank 1 what is never received"
    assert "there is no rank 2 among 2" in play(no_modulo, (), ())[0]


def test_a_call_that_nobody_waits_for_brings_nothing():
    def act():
        total = torch.ones(1)
        dist.all_reduce(total, async_op=True)
        return total.item()

    assert play(act, (), ())[1] == [1.0, 1.0]
