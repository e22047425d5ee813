"""Wrong arguments are refused with one message, the same on every rank, and the next call works."""

import pytest
import torch
import torch.distributed as dist

from scratch_ddp import collectives as ours
from scratch_ddp.collectives import unchecked
from scratch_ddp.instruments.traffic import traffic
from tests.ranks import assert_refused, run_ranks


def only(mine, others, rank=1):
    """`mine` on this rank, else `others`."""
    return mine if dist.get_rank() == rank else others


X, TREE, RING = torch.zeros(3), ours.tree_broadcast, ours.ring_all_reduce
THREE = [torch.zeros(3) for _ in range(3)]
REFUSED = [
    ("rank 1: tree_broadcast: tensor must be a torch.Tensor, not int", lambda: TREE(only(3, X))),
    ("rank 1: star_broadcast: src=3 is not in the group", lambda: ours.star_broadcast(X, only(3, 0))),
    ("rank 1: entry 0 is tree_broadcast: src 1, but tree_broadcast: src 0 on rank 0", lambda: TREE(X, only(1, 0))),
    ("rank 1: entry 0 is ring_all_reduce: shape (4,), but", lambda: RING(only(torch.zeros(4), X))),
    ("rank 1: entry 2 is reduce: dtype float64, but", lambda: ours.reduce(only(X.double(), X))),
    ("tree_broadcast: src 0, but reduce: dst 0 on rank 0", lambda: only(TREE, ours.reduce)(X)),
    ("tensor_list must be a list of 3 tensors", lambda: ours.all_gather(THREE[:2], X)),
    ("tensor_list[1] must be a torch.Tensor, not None", lambda: ours.all_gather([X, None, X], X)),
    ("tensor has dtype float64, but tensor_list[0] has dtype float32", lambda: ours.all_gather(THREE, X.double())),
]


def test_wrong_arguments_are_refused_on_every_rank_alike():
    assert_refused(3, REFUSED)


def compares(function, *args) -> bool:
    """Whether a call compares first."""
    with traffic() as counted:
        function(*args)
    return counted.setup.calls == {"all_reduce": 1}


def without_comparing() -> None:
    x = torch.arange(10.0)
    assert compares(RING, x)
    with unchecked():
        with unchecked():
            assert not compares(RING, x)
        assert not compares(TREE, x)
    with pytest.raises(KeyboardInterrupt), unchecked():
        raise KeyboardInterrupt
    assert compares(RING, x) and x.tolist() == [8.0 * i for i in range(10)]


def test_unchecked_calls_compare_nothing():
    run_ranks(2, without_comparing)
