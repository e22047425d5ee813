"""Bad input is one sentence on every rank, before anything is sent."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.experts import ExpertParallel
from tests.experts.cases import D, build
from tests.ranks import run_ranks


def _all_say(function, says):
    """Both ranks raise the same ValueError from `function(rank)`, and can go on."""

    def ranks():
        with pytest.raises(ValueError) as raised:
            function(dist.get_rank())
        dist.barrier()
        return str(raised.value)

    first, second = run_ranks(2, ranks, timeout=30)
    assert first == second and says in first, first


@pytest.mark.parametrize(
    ("n_experts", "k", "says"),
    [
        ((3, 3), (1, 1), "ranks 0, 1: 3 experts can't be shared out to 2 ranks equally"),
        ((0, 0), (1, 1), "ranks 0, 1: 0 experts can't be shared out to 2 ranks equally"),
        ((4, 3), (1, 1), "rank 1: 3 experts can't be shared out to 2 ranks equally"),
        ((4, 4), (1, 5), "rank 1: k must be a number of experts from 1 to 4, not 5"),
        ((4, 4), (0, 0), "ranks 0, 1: k must be a number of experts from 1 to 4, not 0"),
        ((4, 4), (1, 2), "rank 1: entry 0 is k=2, but k=1 on rank 0"),
        ((4, 2), (1, 1), "rank 1: entry 1 is router [(2, 6)], but router [(4, 6)] on rank 0"),
    ],
)
def test_construction(n_experts, k, says):
    _all_say(lambda rank: ExpertParallel(*build(n_experts[rank]), k[rank]), says)


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (torch.zeros(3, 2).double(), "rank 1: entry 0 is torch.float64, d = 2, but torch.float64, d = 6 on rank 0"),
        (torch.zeros(3, D), "rank 1: entry 0 is torch.float32, d = 6"),
        (torch.zeros(3, D).double().requires_grad_(), "rank 1: entry 1 is requires_grad True"),
        (torch.zeros(3, D).long(), "rank 1: x must be a floating tensor (…, d), not torch.int64"),
        (None, "rank 1: x must be a floating tensor (…, d), not NoneType"),
    ],
)
def test_input(x, says):
    def call(rank):
        ExpertParallel(*build(4), 2)(x if rank else torch.zeros(3, D).double())

    _all_say(call, says)


def test_a_router_that_knows_other_experts():
    def call(rank):
        ExpertParallel(nn.Linear(D, 6).double(), build(4)[1], 2)(torch.zeros(3, D).double())

    _all_say(call, "the router gives 6 columns for 4 experts")
