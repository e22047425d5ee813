"""A group on a link carries everything that plain gloo carries, with the same values, and each of it takes the link."""

import pytest
import torch
import torch.distributed as dist

from scratch_ddp.instruments.network import Link, linked_group
from tests.cells.group_cases import COLLECTIVES, run_cases
from tests.cells.group_users import USERS
from tests.ranks import run_ranks

CASES = [case for case in [*COLLECTIVES, *USERS] if case.__name__ not in ("sub_groups", "plain_gloo_sub_group")]


def on_a_link():
    """The cases use the default group, so the linked one takes its place."""
    group = linked_group(Link(alpha=1e-5, beta=1e-10))
    dist.distributed_c10d._update_default_pg(group)
    found = {}
    for case in CASES:
        group.transfers.clear()
        found |= run_cases([case])
        found[case.__name__] = found[case.__name__], len(group.transfers)
    return found


@pytest.fixture(scope="module")
def both():
    plain = run_ranks(4, run_cases, CASES, timeout=100)
    return list(zip(plain, run_ranks(4, on_a_link, timeout=100), strict=True))


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_gives_what_plain_gloo_gives(both, case):
    for rank, (plain, linked) in enumerate(both):
        assert not isinstance(plain[case], str), f"the case itself is wrong: {plain[case]}"
        value, transfers = linked[case]
        assert same(plain[case], value), f"rank {rank}: gloo gave {plain[case]}, the link {value}"
        assert transfers or case == "meshes"  # which makes groups of its own


def same(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return one == other


def test_a_part_of_the_ranks_that_are_in_unequally_many_groups():
    """torch names a group of a part after how many groups a rank has: the ranks must not wait for different names."""

    def linked_thrice():
        dist.new_group([1, 2])  # rank 0 has a group less
        part = dist.new_group([0, 1])
        sums = []
        for _ in range(3) if dist.get_rank() < 2 else ():  # the same name would find what the one before has left
            linked = linked_group(Link(0, 0), part)
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=linked)
            sums.append(tensor.item())
            dist.destroy_process_group(linked)
        return sums

    assert run_ranks(3, linked_thrice, timeout=30) == [[2, 2, 2], [2, 2, 2], []]
