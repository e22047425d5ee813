"""n ranks do what one process would have done: step by step, in float64, whatever the model is like."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.ddp.cases import (
    CASES,
    ROWS,
    STRATEGIES,
    NoGradient,
    batches,
    bits,
    build,
    gathered,
    mlp,
    one_process_step,
    shard,
)
from tests.ranks import run_ranks

STEPS = 4
everywhere = pytest.mark.parametrize("world_size", [2, 4])
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.__name__)


def tolerance(tensor: torch.Tensor) -> float:
    return 1e-12 if tensor.dtype == torch.float64 else 1e-6


def assert_equal(mine: torch.nn.Module, expected: torch.nn.Module, step: int) -> None:
    for (name, a), b in zip(mine.named_parameters(), expected.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), f"step {step}: gradient of {name} is {a.grad} for {b.grad}"
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance(a), msg=lambda text, n=name: f"step {step} {n}: {text}")
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=tolerance(a))
    for (name, a), b in zip(mine.named_buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12, msg=lambda text, n=name: f"step {step} {n}: {text}")


def compare_with_one_process(strategy, case_name: str, set_to_none: bool) -> None:
    case, rank, world_size = CASES[case_name], dist.get_rank(), dist.get_world_size()
    alone = build(case)
    wrapped = strategy(build(case))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (alone, wrapped)]
    for step, (x, y) in enumerate(batches(STEPS, world_size)):
        one_process_step(case, alone, x, y, world_size)
        case.loss(wrapped, shard(x, rank), shard(y, rank)).backward()
        wrapped.sync_gradients()
        for optimizer in optimizers:
            optimizer.step()
        assert_equal(wrapped.module, alone, step)
        assert len(set(gathered(bits(wrapped.module)))) == 1, f"replicas differ after step {step}"
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)


def each_in_turn(compare, strategy, cases, *args) -> None:
    """All cases on the same ranks: starting ranks takes longer than a case does."""
    for case in cases:
        try:
            compare(strategy, case, *args)
        except Exception as error:
            error.add_note(f"the case is {case!r}")
            raise


@everywhere
@each_strategy
def test_equals_one_process(strategy, world_size):
    run_ranks(world_size, each_in_turn, compare_with_one_process, strategy, CASES, True)


@each_strategy
def test_equals_one_process_when_gradients_are_zeroed_in_place(strategy):
    cases = ["mlp", "transposed", "several dtypes"]
    run_ranks(2, each_in_turn, compare_with_one_process, strategy, cases, False)


def compare_with_torch(strategy, case_name: str) -> None:
    case, rank, world_size = CASES[case_name], dist.get_rank(), dist.get_world_size()
    ours = strategy(build(case))
    torchs = DistributedDataParallel(build(case), find_unused_parameters=case_name == "unused")
    for step, (x, y) in enumerate(batches(STEPS, world_size)):
        for model in (ours, torchs):
            case.loss(model, shard(x, rank), shard(y, rank)).backward()
        ours.sync_gradients()
        for (name, a), b in zip(ours.module.named_parameters(), torchs.module.parameters(), strict=True):
            if b.grad is not None:  # torch leaves zeros, we leave None, where no rank has a gradient
                mine = torch.zeros_like(a) if a.grad is None else a.grad
                torch.testing.assert_close(mine, b.grad, rtol=0, atol=tolerance(a), msg=f"step {step}: {name}")
        for model in (ours, torchs):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
    if rank == 0:  # on the others, torch's buffers are rank 0's only from the next forward on
        assert_equal(ours.module, torchs.module, STEPS)
    assert list(ours.state_dict()) == list(torchs.state_dict())


@everywhere
@each_strategy
def test_equals_torchs_own(strategy, world_size):
    cases = ["mlp", "tied", "frozen", "unused", "several dtypes", "BatchNorm", "checkpointing"]
    run_ranks(world_size, each_in_turn, compare_with_torch, strategy, cases)


@each_strategy
def test_one_rank_equals_one_process(strategy):
    run_ranks(1, compare_with_one_process, strategy, "mlp", True)


def accumulate(strategy) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    alone = mlp().double()
    wrapped = strategy(copy.deepcopy(alone))
    data = batches(5, world_size)
    for window in (data[:3], data[3:]):  # the second window is the epoch's remainder
        for i, (x, y) in enumerate(window):
            one_process_step(CASES["mlp"], alone, x, y, world_size)
            if i + 1 < len(window):
                with wrapped.no_sync():
                    CASES["mlp"].loss(wrapped, shard(x, rank), shard(y, rank)).backward()
                    wrapped.sync_gradients()
            else:
                CASES["mlp"].loss(wrapped, shard(x, rank), shard(y, rank)).backward()
                wrapped.sync_gradients()
        for model in (alone, wrapped):
            torch.optim.SGD(model.parameters(), lr=0.1 / len(window)).step()
        assert_equal(wrapped.module, alone, 0)
        alone.zero_grad(), wrapped.zero_grad()


@everywhere
@each_strategy
def test_accumulation_equals_one_process(strategy, world_size):
    run_ranks(world_size, accumulate, strategy)


def freeze_later(strategy) -> None:
    rank = dist.get_rank()
    alone = build(CASES["mlp"])
    wrapped = strategy(copy.deepcopy(alone))
    for step, (x, y) in enumerate(batches(4, 2)):
        for model in (alone, wrapped.module):
            model[0].requires_grad_(step < 2)  # frozen from the third step on
            model.zero_grad()
        one_process_step(CASES["mlp"], alone, x, y, 2)
        CASES["mlp"].loss(wrapped, shard(x, rank), shard(y, rank)).backward()
        wrapped.sync_gradients()
        assert_equal(wrapped.module, alone, step)
        assert (wrapped.module[0].weight.grad is None) == (step >= 2)


@each_strategy
def test_a_layer_may_be_frozen_while_training(strategy):
    run_ranks(2, freeze_later, strategy)


def awkward_numbers(strategy) -> tuple:
    """Gradients with NaN, infinities, -0.0 and values that overflow half precision when they are summed."""
    rank = dist.get_rank()
    model = torch.nn.Linear(4, 2, bias=False).half()
    torch.nn.init.ones_(model.weight)
    wrapped = strategy(model)
    mine = torch.tensor([[60000.0, -0.0, 1.0, float("inf")], [float("nan") if rank == 1 else 1, 3, -60000, -1]])
    model.weight.grad = mine.half()
    model.weight.grad[0, 3] *= 1 if rank else -1  # inf - inf
    wrapped.sync_gradients()
    return bits(model), model.weight.grad.tolist()


@everywhere
@each_strategy
def test_the_same_bits_everywhere_and_no_overflow(strategy, world_size):
    results = run_ranks(world_size, awkward_numbers, strategy)
    assert len({digest for digest, _ in results}) == 1
    (first, zero, one, not_a_number), (nan, three, last, _) = results[0][1]
    assert first == 60000 and last == -60000, "the sum overflowed before it was divided"
    assert (zero, one) == (0, 1) and abs(three - 3) < 0.01
    assert not_a_number != not_a_number and nan != nan


def other_layout(strategy) -> list:
    """Rank 1's gradient lies column by column in memory, rank 0's row by row."""
    model = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.ones_(model.weight)
    wrapped = strategy(model)
    gradient = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    model.weight.grad = gradient if dist.get_rank() == 0 else gradient.t().contiguous().t()
    wrapped.sync_gradients()
    return model.weight.grad.tolist()


@each_strategy
def test_gradients_are_summed_by_position_not_by_address(strategy):
    assert run_ranks(2, other_layout, strategy) == [[[0, 1], [2, 3]]] * 2


def unequal_presence(strategy) -> tuple:
    """Rank 1 has no gradient for one layer, no rank has one for two others (unused; NoGradient)."""
    names = ("some", "all", "none", "refused")
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, bias=False) for name in names})
    wrapped = strategy(model.double()) if dist.get_rank() == 0 else strategy(copy.deepcopy(model).double())
    x = torch.ones(1, 2, dtype=torch.float64)
    y = wrapped.module["all"](x).sum()
    if dist.get_rank() == 0:
        y = y + wrapped.module["some"](x).sum()
    y = y + NoGradient.apply(wrapped.module["refused"].weight).sum()
    y.backward()
    wrapped.sync_gradients()
    return tuple(None if p.grad is None else p.grad.unique().tolist() for p in wrapped.parameters())


@everywhere
@each_strategy
def test_the_mean_counts_an_absent_gradient_as_zero(strategy, world_size):
    for result in run_ranks(world_size, unequal_presence, strategy):
        assert result == ([1 / world_size], [1.0], None, None)


def on_half_the_ranks(strategy, how: str) -> tuple:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    group = {"group": mesh["dp"].get_group(), "dimension": mesh["dp"]}[how]
    torch.manual_seed(mesh["tp"].get_local_rank())  # each column of the mesh has a model of its own
    wrapped = strategy(torch.nn.Linear(1, 1, bias=False).double(), group=group)
    before = wrapped.module.weight.item()
    wrapped(torch.full((ROWS, 1), dist.get_rank(), dtype=torch.float64)).mean().backward()
    wrapped.sync_gradients()
    return before, wrapped.world_size, wrapped.module.weight.grad.item()


@each_strategy
@pytest.mark.parametrize("how", ["group", "dimension"])
def test_a_dimension_of_a_mesh(strategy, how):
    results = run_ranks(4, on_half_the_ranks, strategy, how)
    assert [size for _, size, _ in results] == [2] * 4
    assert [gradient for *_, gradient in results] == [1.0, 2.0, 1.0, 2.0]  # ranks 0 and 2, ranks 1 and 3
    assert results[0][0] == results[2][0] != results[1][0] == results[3][0]
