import inspect
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from ranks import run_ranks

from scratch_ddp import collectives as ours
from scratch_ddp.traffic import traffic

SUMMABLE = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]
MOVABLE = SUMMABLE + [torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn]

shapes = st.sampled_from([(), (0,), (1,), (2,), (3,), (4,), (5,), (17,), (4, 3), (2, 0), (2, 3, 4), (1001,)])
cases = st.fixed_dictionaries(
    {"shape": shapes, "movable": st.sampled_from(MOVABLE), "summable": st.sampled_from(SUMMABLE)}
    | {"root": st.integers(0, 4), "strided": st.booleans()}
)


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
    grid = [[values(shape, dtype, seed=n * i + j) for j in range(n)] for i in range(n)]  # rank i's list

    def empty():
        return values(shape, dtype, seed=99, strided=strided)

    def mine(i=rank):
        return values(shape, dtype, seed=i, strided=strided)

    for broadcast in (ours.star_broadcast, ours.tree_broadcast, ours.broadcast):
        tensor = mine()
        assert broadcast(tensor, root) is None
        yield broadcast.__name__, [tensor], [whole[root]]
    gathered = [empty() for _ in range(n)] if rank == root else None
    ours.gather(mine(), gathered, dst=root)
    yield "gather", gathered or [], whole if rank == root else []
    scattered = empty()
    ours.scatter(scattered, [mine(n * root + j) for j in range(n)] if rank == root else None, src=root)
    yield "scatter", [scattered], [grid[root][rank]]
    gathered = [empty() for _ in range(n)]
    ours.all_gather(gathered, mine())
    yield "all_gather", gathered, whole
    gathered = [empty() for _ in range(n)]
    gathered[rank].copy_(mine())
    ours.all_gather(gathered, gathered[rank])
    yield "all_gather in place", gathered, whole
    exchanged = [empty() for _ in range(n)]
    ours.all_to_all(exchanged, [mine(n * rank + j) for j in range(n)])
    yield "all_to_all", exchanged, [grid[i][rank] for i in range(n)]


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


def run_cases(some):
    n, rank = dist.get_world_size(), dist.get_rank()
    for case in some:
        root = case["root"] % n
        for name, got, expected in [*moves(case, n, rank, root), *sums(case, n, rank, root)]:
            assert len(got) == len(expected) and all(map(same, got, expected)), (name, case, got, expected)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
@settings(
    max_examples=3, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(some=st.lists(cases, min_size=8, max_size=8))
def test_the_same_as_torch_distributed(n, some):
    run_ranks(n, run_cases, some)


@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_a_ring_gives_every_rank_the_same_bits(n):
    def ranks():
        torch.manual_seed(dist.get_rank())
        drawn = torch.randn(997)
        kinds = [ours.ring_all_reduce(drawn.clone()), ours.false_ring_all_reduce(drawn.clone())]
        dist.all_reduce(drawn)
        assert all(torch.allclose(kind, drawn, atol=1e-4) for kind in kinds)
        return [kind.numpy().tobytes() for kind in kinds]

    for answers in zip(*run_ranks(n, ranks), strict=True):
        assert len(set(answers)) == 1


def test_a_group_whose_ranks_are_not_those_of_the_world():
    def ranks():
        group, rank = dist.new_group([1, 3, 4]), dist.get_rank()  # src and dst are global ranks
        if rank not in (1, 3, 4):
            with pytest.raises(ValueError, match=f"rank {rank} is not in the group"):
                ours.ring_all_reduce(torch.ones(2), group=group)
            return
        place = [1, 3, 4].index(rank)
        for broadcast in (ours.star_broadcast, ours.tree_broadcast):
            tensor = torch.tensor([rank])
            broadcast(tensor, src=3, group=group)
            assert tensor.item() == 3
        tensor = torch.tensor([rank])
        ours.reduce(tensor, dst=4, group=group)
        assert tensor.item() == (8 if rank == 4 else rank)
        assert ours.ring_all_reduce(torch.full((5,), rank), group).tolist() == [8] * 5
        everyone = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
        ours.all_gather(everyone, torch.tensor([rank]), group)
        assert torch.cat(everyone).tolist() == [1, 3, 4]
        ours.gather(torch.tensor([rank * 10]), everyone if rank == 3 else None, dst=3, group=group)
        assert torch.cat(everyone).tolist() == ([10, 30, 40] if rank == 3 else [1, 3, 4])
        piece = torch.zeros(1)
        ours.scatter(piece, list(torch.arange(3.0).split(1)) if rank == 4 else None, src=4, group=group)
        assert piece.item() == place
        ours.reduce_scatter(piece, list((torch.arange(3.0) + rank).split(1)), group)
        assert piece.item() == 3 * place + 8
        swapped = [torch.zeros(1) for _ in range(3)]
        ours.all_to_all(swapped, list((torch.arange(3.0) + 10 * rank).split(1)), group)
        assert torch.cat(swapped).tolist() == [10 + place, 30 + place, 40 + place]
        with pytest.raises(ValueError, match=r"src=0 is not in the group.*\[1, 3, 4\]"):
            ours.broadcast(torch.ones(1), src=0, group=group)

    run_ranks(5, ranks)


def test_a_result_may_be_the_input():
    def ranks():
        rank, n = dist.get_rank(), dist.get_world_size()
        tensors = [torch.full((2,), 10 * rank + i) for i in range(n)]
        ours.reduce_scatter(tensors[0], tensors)
        assert tensors[0].tolist() == [30 + 3 * rank] * 2
        tensors = [torch.full((2,), i) for i in range(n)]
        ours.scatter(tensors[2], tensors if rank == 1 else None, src=1)
        assert tensors[2].tolist() == [rank] * 2
        leaving, arriving = (
            [torch.full((2,), 10 * rank + i) for i in range(n)],
            [torch.zeros(2).long() for _ in range(n)],
        )
        arriving[rank] = leaving[rank]
        ours.all_to_all(arriving, leaving)
        assert torch.stack(arriving).tolist() == [[10 * i + rank] * 2 for i in range(n)]

    run_ranks(3, ranks)


def test_complex_conjugates_arrive_as_what_they_show():
    def ranks():
        tensor = torch.full((3,), complex(1, dist.get_rank())).conj()
        ours.broadcast(tensor, src=1)
        assert tensor.tolist() == [1 - 1j] * 3

    run_ranks(2, ranks)


def test_the_two_halves_make_the_ring():
    def ranks():
        torch.manual_seed(dist.get_rank())
        tensor = torch.randn(10)
        with traffic() as ring:
            expected = ours.ring_all_reduce(tensor.clone())
        with traffic() as halves:
            chunks = tensor.tensor_split(4)
            complete = ours.ring_reduce_scatter(chunks)
            assert same(chunks[complete], expected.tensor_split(4)[complete])
            assert halves.messages == 3
            ours.ring_all_gather(chunks)
        assert same(tensor, expected)
        assert (halves.messages, halves.bytes_sent) == (ring.messages, ring.bytes_sent)

    run_ranks(4, ranks)


def costs(n, elements):
    """Of each collective: (messages, bytes sent, of the rank that sends most, depth), with what it should be."""
    rank, size = dist.get_rank(), 4 * elements
    lists = [[torch.zeros(elements) for _ in range(n)] for _ in range(2)]
    tensor, last, log = torch.zeros(elements), n - 1, math.ceil(math.log2(n))
    of_root = lists[0] if rank == last else None
    everyone = (n * (n - 1), n * (n - 1) * size, (n - 1) * size, min(1, n - 1))
    ring = (2 * n * (n - 1), 2 * (n - 1) * size, None, 2 * (n - 1))
    steps = [
        (ours.star_broadcast, (tensor, last), (n - 1, (n - 1) * size, (n - 1) * size, n - 1)),
        (ours.tree_broadcast, (tensor, last), (n - 1, (n - 1) * size, log * size, log)),
        (ours.reduce, (tensor, last), (n - 1, (n - 1) * size, min(1, n - 1) * size, log)),
        (ours.gather, (tensor, of_root, last), (n - 1, (n - 1) * size, min(1, n - 1) * size, min(1, n - 1))),
        (ours.scatter, (tensor, of_root, last), (n - 1, (n - 1) * size, (n - 1) * size, min(1, n - 1))),
        (ours.all_gather, (lists[0], tensor), everyone),
        (ours.reduce_scatter, (tensor, lists[0]), everyone),
        (ours.all_to_all, lists, everyone),
        (ours.ring_all_reduce, (tensor,), ring),
        (ours.false_ring_all_reduce, (tensor,), (2 * n * (n - 1), n * ring[1], 2 * (n - 1) * size, 2 * (n - 1))),
    ]
    for function, args, expected in steps:
        with traffic() as counted:
            function(*args)
        whole = counted.over_ranks()
        most = None if expected[2] is None else whole.max_bytes_sent
        yield function.__name__, (whole.messages, whole.bytes_sent, most, whole.depth), expected
        assert counted.setup.calls == {"all_reduce": 1} and counted.setup.payload_bytes == 24
        assert not set(counted.calls) - {"send", "recv"}


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
def test_costs_are_those_of_the_docstrings(n):
    def ranks():
        for elements in (840, 3, 0):
            for name, counted, expected in costs(n, elements):
                assert counted == expected, (name, elements)
        with traffic() as counted:
            ours.ring_all_reduce(torch.zeros(840))
        assert counted.bytes_sent == 2 * (n - 1) * 840 * 4 // n  # 840 can be divided by all these n

    run_ranks(n, ranks)


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


@pytest.mark.parametrize("function", [ours.tree_broadcast, ours.reduce, ours.ring_all_reduce])
def test_answers_can_be_taken_out_between_the_markers(function):
    lines = [line.strip() for line in inspect.getsource(function).splitlines()]
    begin, end = lines.index("# answer: begin"), lines.index("# answer: end")
    assert 0 < end - begin - 1 <= 25
    assert lines.count("# answer: begin") == lines.count("# answer: end") == 1
