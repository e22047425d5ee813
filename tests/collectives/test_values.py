"""The collectives made of send and recv give what torch.distributed gives."""

import random

import pytest
import torch
import torch.distributed as dist

from scratch_ddp import collectives as ours
from tests.ranks import in_turn

SUMMABLE = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]
MOVABLE = SUMMABLE + [torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn]

SHAPES = [(), (0,), (1,), (2,), (3,), (4,), (5,), (17,), (4, 3), (2, 0), (2, 3, 4), (1001,)]


def values(shape, dtype, seed, strided=False):
    """Small whole numbers: any order of adding them up gives the same bits. Strided: every other element of memory."""
    memory = torch.randint(0, 8, (*shape, 2), generator=torch.Generator().manual_seed(seed)).to(dtype)
    return memory[..., 0] if strided else memory[..., 0].contiguous()


def same(a, b):
    """Shape, dtype and bits are the same."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    fresh = [x.new_empty(x.shape).copy_(x).view(-1) for x in (a, b)]
    return torch.equal(*(x.view(torch.uint8) if x.numel() else x for x in fresh))


def moves(case, n, rank, root):
    """What the collectives that only move data give, each with what it should be."""
    dtype, shape, strided = case["movable"], case["shape"], case["strided"]
    whole = [values(shape, dtype, seed=i) for i in range(n)]  # rank i's tensor

    def empty():
        return values(shape, dtype, seed=99, strided=strided)

    def mine(i=rank):
        return values(shape, dtype, seed=i, strided=strided)

    for broadcast in (ours.star_broadcast, ours.tree_broadcast):
        tensor = mine()
        assert broadcast(tensor, root) is None
        yield broadcast.__name__, [tensor], [whole[root]]
    gathered = [empty() for _ in range(n)]
    ours.all_gather(gathered, mine())
    yield "all_gather", gathered, whole
    gathered = [empty() for _ in range(n)]
    gathered[rank].copy_(mine())
    ours.all_gather(gathered, gathered[rank])
    yield "all_gather in place", gathered, whole


def sums(case, n, rank, root):
    """The same for those that add up. What they should give is torch.distributed's own answer."""
    dtype, shape, strided = case["summable"], case["shape"], case["strided"]
    total = values(shape, dtype, seed=rank)
    dist.all_reduce(total)

    def mine(i=rank):
        return values(shape, dtype, seed=i, strided=strided)

    for all_reduce in (ours.ring_all_reduce, ours.false_ring_all_reduce):
        tensor = mine()
        assert all_reduce(tensor) is tensor
        yield all_reduce.__name__, [tensor], [total]
    tensor = mine()
    assert ours.reduce(tensor, root) is None
    yield "reduce", [tensor], [total if rank == root else values(shape, dtype, seed=rank)]
    pieces = [values(shape, dtype, seed=n * rank + j) for j in range(n)]
    for piece in pieces:
        dist.all_reduce(piece)
    output, inputs = mine(99), [mine(n * rank + j) for j in range(n)]
    ours.reduce_scatter(output, inputs)
    yield "reduce_scatter", [output], [pieces[rank]]
    yield "reduce_scatter's input", inputs, [values(shape, dtype, seed=n * rank + j) for j in range(n)]
    inputs = [mine(n * rank + j) for j in range(n)]
    ours.reduce_scatter(inputs[0], inputs)
    yield "reduce_scatter in place", inputs[:1], [pieces[rank]]


def compare(number: int) -> None:
    """All collectives in a case that is drawn."""
    n, rank, draw = dist.get_world_size(), dist.get_rank(), random.Random(number)
    case = {"shape": draw.choice(SHAPES), "movable": draw.choice(MOVABLE), "summable": draw.choice(SUMMABLE)}
    case["strided"], root = draw.random() < 0.5, draw.randrange(n)
    for name, got, expected in [*moves(case, n, rank, root), *sums(case, n, rank, root)]:
        assert len(got) == len(expected) and all(map(same, got, expected)), (name, case, got, expected)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_the_same_as_torch_distributed(n):
    in_turn(n, compare, [(number,) for number in range(12 * n, 12 * n + 12)])


def a_part_of_the_world() -> None:
    """`src` and `dst` are global ranks."""
    group, rank = dist.new_group([1, 3, 4]), dist.get_rank()
    if rank not in (1, 3, 4):
        with pytest.raises(ValueError, match=f"rank {rank} is not in the group"):
            ours.ring_all_reduce(torch.ones(2), group=group)
        return
    ours.star_broadcast(tensor := torch.tensor([rank]), src=3, group=group)
    assert tensor.item() == 3
    ours.reduce(tensor := torch.tensor([rank]), dst=4, group=group)
    assert tensor.item() == (8 if rank == 4 else rank)
    assert ours.ring_all_reduce(torch.full((5,), rank), group).tolist() == [8] * 5
    with pytest.raises(ValueError, match=r"src=0 is not in the group.*\[1, 3, 4\]"):
        ours.tree_broadcast(torch.ones(1), src=0, group=group)


def conjugates() -> None:
    """They arrive as what they show."""
    tensor = torch.full((3,), complex(1, dist.get_rank())).conj()
    ours.tree_broadcast(tensor, src=1)
    assert tensor.tolist() == [1 - 1j] * 3


def rings() -> None:
    """Every rank gets the same bits."""
    n = dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    tensor = torch.randn(997)
    for all_reduce in (ours.ring_all_reduce, ours.false_ring_all_reduce):
        expected = all_reduce(tensor.clone())
        everywhere = [torch.empty_like(expected) for _ in range(n)]
        dist.all_gather(everywhere, expected)
        assert all(same(each, expected) for each in everywhere)


def results() -> None:
    """They are the caller's own, although memory is used again."""
    found, n = [], dist.get_world_size()
    for call in range(3):
        mine = torch.full((1001,), 10.0**call)
        ours.reduce_scatter(part := torch.empty(1001), [mine] * n)
        found += [ours.ring_all_reduce(mine.clone()), ours.false_ring_all_reduce(mine.clone()), part]
    assert [each.unique().tolist() for each in found] == [[n * 10.0 ** (i // 3)] for i in range(9)]


def test_groups_complex_numbers_rings_and_results():
    in_turn(5, lambda check: check(), [(a_part_of_the_world,), (conjugates,), (rings,), (results,)])
