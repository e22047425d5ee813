"""Collectives that take each rank's word: the same results, nothing sent beside the data, errors on one rank alone."""

import pytest
import torch
import torch.distributed as dist

from scratch_ddp import collectives as ours
from scratch_ddp.collectives import unchecked
from scratch_ddp.instruments.traffic import traffic
from tests.ranks import run_ranks


def compared(function, *args):
    """Whether a call compares first."""
    with traffic() as counted:
        function(*args)
    return counted.setup.calls == {"all_reduce": 1}


def test_same_result_and_nothing_beside_the_data():
    def ranks():
        rank = dist.get_rank()
        mine = torch.arange(10.0) * (rank + 1)
        expected = ours.ring_all_reduce(mine.clone())
        with traffic() as counted, unchecked():
            result = ours.ring_all_reduce(mine)
        assert torch.equal(result, expected) and result is mine
        return dict(counted.setup.calls), counted.messages

    assert run_ranks(3, ranks) == [({}, 4)] * 3


def test_a_wrong_argument_raises_where_it_is_before_anything_is_sent():
    def ranks():
        with traffic() as counted, unchecked():
            if dist.get_rank() == 1:
                with pytest.raises(TypeError, match="^tensor must be a torch.Tensor, not list$"):
                    ours.ring_all_reduce([1.0])
        return counted.messages

    assert run_ranks(2, ranks) == [0, 0]


def test_compared_again_afterwards_also_after_an_error_and_in_a_block_in_a_block():
    def ranks():
        x = torch.ones(3)
        seen = [compared(ours.ring_all_reduce, x)]
        with unchecked():
            with unchecked():
                seen.append(compared(ours.ring_all_reduce, x))
            seen.append(compared(ours.tree_broadcast, x))
        seen.append(compared(ours.ring_all_reduce, x))
        with pytest.raises(KeyboardInterrupt), unchecked():
            raise KeyboardInterrupt
        return [*seen, compared(ours.ring_all_reduce, x)]

    assert run_ranks(2, ranks) == [[True, False, False, True, True]] * 2
