"""Wrong arguments are refused with one message, the same on every rank, and the next call works."""

import pytest
import torch
import torch.distributed as dist

from scratch_ddp import collectives as ours
from scratch_ddp.collectives import unchecked
from scratch_ddp.instruments.traffic import traffic
from tests.ranks import run_ranks


def refused(function, *args):
    with pytest.raises(ValueError) as caught:
        function(*args)
    return str(caught.value)


def wrong_calls(rank):
    """(what the message says, the call): wrong on every rank, on rank 1 only, or different on rank 1."""
    odd = rank == 1
    x, three = torch.zeros(3), [torch.zeros(3) for _ in range(3)]
    tree = ours.tree_broadcast
    yield "rank 1: tree_broadcast: tensor must be a torch.Tensor, not int", (tree, 3 if odd else x)
    yield "rank 1: star_broadcast: src=3 is not in the group", (ours.star_broadcast, x, 3 if odd else 0)
    yield "rank 1: entry 0 is tree_broadcast: src 1, but tree_broadcast: src 0 on rank 0", (tree, x, rank % 2)
    yield "rank 1: entry 0 is ring_all_reduce: shape (4,), but", (ours.ring_all_reduce, torch.zeros(4) if odd else x)
    yield "rank 1: entry 2 is reduce: dtype float64, but", (ours.reduce, x.double() if odd else x)
    yield "tree_broadcast: src 0, but reduce: dst 0 on rank 0", (tree if odd else ours.reduce, x)
    yield "tensor_list must be a list of 3 tensors", (ours.all_gather, three[:2], x)
    yield "tensor_list[1] must be a torch.Tensor, not NoneType", (ours.all_gather, [x, None, x], x)
    yield "tensor has dtype float64, but tensor_list[0] has dtype float32", (ours.all_gather, three, x.double())


def test_wrong_arguments_are_refused_on_every_rank_alike():
    def ranks():
        answers = []
        for _, (function, *args) in wrong_calls(dist.get_rank()):
            answers.append(refused(function, *args))
            assert ours.ring_all_reduce(torch.ones(2)).tolist() == [3, 3]  # and the next call works
        return answers

    all_answers = run_ranks(3, ranks)
    for (expected, _), *answers in zip(wrong_calls(0), *all_answers, strict=True):
        assert len(set(answers)) == 1 and expected in answers[0], (expected, answers)


def compared(function, *args):
    """Whether a call compares first."""
    with traffic() as counted:
        function(*args)
    return counted.setup.calls == {"all_reduce": 1}


def test_unchecked_calls_compare_nothing():
    def ranks():
        x = torch.arange(10.0)
        seen = [compared(ours.ring_all_reduce, x)]
        with unchecked():
            with unchecked():
                seen.append(compared(ours.ring_all_reduce, x))
            seen.append(compared(ours.tree_broadcast, x))
        with pytest.raises(KeyboardInterrupt), unchecked():
            raise KeyboardInterrupt
        assert x.tolist() == [4.0 * i for i in range(10)]
        return [*seen, compared(ours.ring_all_reduce, x)]

    assert run_ranks(2, ranks) == [[True, False, False, True]] * 2
