"""Wrong arguments are refused with one message, the same on every rank, and the next call works."""

import pytest
import torch
import torch.distributed as dist

from scratch_ddp import collectives as ours
from tests.ranks import run_ranks


def refused(function, *args, **kwargs):
    with pytest.raises((TypeError, ValueError)) as caught:
        function(*args, **kwargs)
    return type(caught.value).__name__, str(caught.value)


class Unreadable(torch.Tensor):
    def data_ptr(self):
        raise RuntimeError("no memory behind it")


def wrong_calls(rank):
    """(what the message says, the call): wrong on every rank, on rank 1 only, or different on rank 1."""
    odd = rank == 1
    x, y = torch.zeros(3), torch.zeros(3)
    three, of_root = [torch.zeros(3) for _ in range(3)], [torch.zeros(3) for _ in range(3)] if rank == 0 else None
    leaf = torch.zeros(3, requires_grad=True)
    yield "not list", (ours.tree_broadcast, [1.0])
    yield "rank 1: tensor must be a torch.Tensor, not int", (ours.tree_broadcast, 3 if odd else x)
    yield "src=3 is not in the group", (ours.star_broadcast, x, 3)
    yield "src=-1 is not in the group", (ours.broadcast, x, -1)
    yield "src must be a rank, an int, not str", (ours.broadcast, x, "0")
    yield "dst must be a rank, an int, not bool", (ours.reduce, x, True)
    yield "src: ranks 0, 2: 0; rank 1: 1", (ours.tree_broadcast, x, 1 if odd else 0)
    yield "shape: ranks 0, 2: (3,); rank 1: (4,)", (ours.ring_all_reduce, torch.zeros(4 if odd else 3))
    yield "dtype: ranks 0, 2: float32; rank 1: int32", (ours.ring_all_reduce, torch.zeros(3).int() if odd else x)
    yield "call: ranks 0, 2: reduce; rank 1: tree_broadcast", (ours.tree_broadcast if odd else ours.reduce, x)
    yield "tensor requires grad", (ours.ring_all_reduce, leaf)
    yield "rank 1: tensor requires grad", (ours.broadcast, leaf if odd else x)
    yield "requires grad", (ours.false_ring_all_reduce, leaf * 2)
    yield "tensor is expanded", (ours.broadcast, torch.zeros(1).expand(3))
    yield "dense tensor", (ours.broadcast, torch.zeros(3).to_sparse())
    yield "dense tensor", (ours.broadcast, torch.zeros(3, device="meta"))
    yield "rank 1: no memory behind it", (ours.broadcast, torch.zeros(3).as_subclass(Unreadable) if odd else x)
    yield "a sum of bool", (ours.ring_all_reduce, x.bool())
    yield "can't add tensors of float8_e4m3fn", (ours.reduce, x.to(torch.float8_e4m3fn))
    yield "tensor_list must have one tensor for each of the 3 ranks, not 2", (ours.all_gather, three[:2], x)
    yield "tensor_list must be a list of 3 tensors, not Tensor", (ours.all_gather, torch.zeros(3, 3), x)
    yield "tensor_list[1] must be a torch.Tensor, not NoneType", (ours.all_gather, [x, None, y], x)
    yield "tensor_list[1] is the same memory as tensor_list[0]", (ours.all_gather, [x] * 3, y)
    yield (
        "tensor_list[2] has shape (4,), but tensor_list[0] has (3,)",
        ((ours.all_gather, [*three[:2], torch.zeros(4)], x) if odd else (ours.all_gather, three, x)),
    )
    yield "tensor has dtype float64, but tensor_list[0] has float32", (ours.all_gather, three, x.double())
    yield "rank 0: gather_list must be a list of 3 tensors, not NoneType", (ours.gather, x, None)
    yield "ranks 1, 2: gather_list must be None where the rank is not dst", (ours.gather, x, three)
    yield "rank 0: scatter_list must have one tensor for each of the 3 ranks, not 0", (ours.scatter, x, of_root and [])
    yield "ranks 1, 2: scatter_list must be None", (ours.scatter, x, three)
    yield "input_list must be a list", (ours.reduce_scatter, x, None)
    yield (
        "shape: ranks 0, 2: (3,); rank 1: (2,)",
        (
            ours.reduce_scatter,
            *((torch.zeros(2), list(torch.zeros(3, 2))) if odd else (x, three)),
        ),
    )
    yield "output_list[0] is the same memory as input_list[0]", (ours.all_to_all, three, three)


def test_wrong_arguments_are_refused_on_every_rank_alike():
    def ranks():
        answers = []
        for _, (function, *args) in wrong_calls(dist.get_rank()):
            answers.append(refused(function, *args))
            assert ours.ring_all_reduce(torch.ones(2)).tolist() == [3, 3]  # and the next call works
        with torch.no_grad():
            ours.broadcast(torch.zeros(3, requires_grad=True))
        return answers

    all_answers = run_ranks(3, ranks)
    for (expected, _), *answers in zip(wrong_calls(0), *all_answers, strict=True):
        assert len(set(answers)) == 1 and expected in answers[0][1], (expected, answers)
    assert {kind for kind, _ in all_answers[0]} == {"TypeError", "ValueError"}


def test_wrong_groups_and_no_group_are_refused():
    with pytest.raises(RuntimeError, match="no process group yet"):
        ours.ring_all_reduce(torch.ones(1))

    def ranks():
        return refused(ours.ring_all_reduce, torch.ones(1), "world")

    assert run_ranks(2, ranks) == [("TypeError", run_ranks(1, ranks)[0][1])] * 2
