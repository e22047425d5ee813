"""n ranks with a share of the model each do what one process does with all of it: step by step, in float64."""

import copy

import pytest
import torch
import torch.distributed as dist

from scratch_ddp.fsdp import FSDP
from tests.ddp.cases import ROWS, batches, build, one_process_step, shard
from tests.fsdp.cases import CASES, assert_equal
from tests.ranks import run_ranks

STEPS = 3
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
    "Adamax": lambda parameters: torch.optim.Adamax(parameters, lr=0.01),
}


def compare_with_one_process(case_name: str, optimizer: str = "SGD", **settings) -> None:
    case, rank, world_size = CASES[case_name], dist.get_rank(), dist.get_world_size()
    alone = build(case)
    sharded = FSDP(build(case), **settings)
    optimizers = [OPTIMIZERS[optimizer](model.parameters()) for model in (alone, sharded)]
    for step, (x, y) in enumerate(batches(STEPS, world_size)):
        one_process_step(case, alone, x, y, world_size)
        case.loss(sharded, shard(x, rank), shard(y, rank)).backward()
        sharded.sync_gradients()
        for each in optimizers:
            each.step()
        assert_equal(sharded, alone, step)
        for each in optimizers:
            each.zero_grad(set_to_none=step % 2 == 0)
        if step % 2:  # gradients that are zero are no longer None
            for parameter in alone.parameters():
                parameter.grad = None
            sharded.zero_grad()


def each_case(cases, **settings) -> None:
    """All cases on the same ranks: starting ranks takes longer than a case does."""
    for case in cases:
        try:
            compare_with_one_process(case, **settings)
        except Exception as error:
            error.add_note(f"the case is {case!r}")
            raise


def run(world_size: int, cases, **settings) -> None:
    run_ranks(world_size, lambda: each_case(cases, **settings))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equals_one_process(world_size):
    run(world_size, CASES)


@pytest.mark.parametrize(
    "settings",
    [{"free_after_forward": False}, {"prefetch": 0}, {"prefetch": 2}],
    ids=lambda settings: "-".join(f"{name}={value}" for name, value in settings.items()),
)
def test_equals_one_process_with_other_settings(settings):
    hardest = ["mlp", "unused", "two forwards", "a unit twice", "another order", "segments", "reentrant segments"]
    run(2, [*hardest, "adapters", "penalty", "all recomputed"], **settings)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_optimizer_that_works_element_by_element(optimizer):
    run(3, ["tiny parameters", "mlp"], optimizer=optimizer)


def test_one_unit_and_units_by_name_and_type():
    run(2, ["adapters"], units=["blocks.0", "blocks.1", "last"])
    run(2, ["adapters", "mlp", "structured"], units=[torch.nn.Linear])

    def only_the_root():
        model = build(CASES["mlp"])
        sharded = FSDP(model, units=[model])
        sharded(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
        sharded.sync_gradients()
        return len(list(sharded.gather_full_grads()))

    assert run_ranks(2, only_the_root) == [4, 4]


def replicated() -> None:
    """Norms and a whole layer stay whole on every rank; a tied parameter too."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    alone = torch.nn.Sequential(
        torch.nn.Linear(6, 6),
        torch.nn.LayerNorm(6),
        torch.nn.Linear(6, 6),
        torch.nn.LayerNorm(6),
        torch.nn.Linear(6, 6),
    ).double()
    alone[4].weight = alone[2].weight
    sharded = FSDP(copy.deepcopy(alone), replicated=[torch.nn.LayerNorm, "2.weight", "0"])
    shapes = {name: tuple(parameter.shape) for name, parameter in sharded.named_parameters()}
    assert shapes["0.weight"] == shapes["2.weight"] == (6, 6) and shapes["1.bias"] == (6,)
    assert shapes["4.bias"] == ((3,) if world_size == 2 else (2,))
    optimizers = [OPTIMIZERS["AdamW"](model.parameters()) for model in (alone, sharded)]
    for step, (x, y) in enumerate(batches(STEPS, world_size)):
        CASES["mlp"].loss(alone, x, y).backward()
        CASES["mlp"].loss(sharded, shard(x, rank), shard(y, rank)).backward()
        sharded.sync_gradients()
        for each in optimizers:
            each.step()
        assert_equal(sharded, alone, step)
        for each in optimizers:
            each.zero_grad()


@pytest.mark.parametrize("world_size", [2, 3])
def test_replicated_parameters(world_size):
    run_ranks(world_size, replicated)


def on_a_mesh() -> tuple:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(mesh["tp"].get_local_rank())  # each column of the mesh has a model of its own
    sharded = FSDP(torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False)).double(), mesh["dp"])
    sharded(torch.full((ROWS, 2), dist.get_rank(), dtype=torch.float64)).mean().backward()
    sharded.sync_gradients()
    (gradient,) = sharded.gather_full_grads().values()
    (whole,) = sharded.gather_full_params().values()
    return sharded.world_size, gradient[0, 0].item(), whole.sum().item(), next(sharded.parameters()).shape


def test_a_dimension_of_a_mesh():
    results = run_ranks(4, on_a_mesh)
    assert [result[0] for result in results] == [2] * 4 and {result[3] for result in results} == {(1, 2)}
    assert [result[1] for result in results] == [0.5, 1.0, 0.5, 1.0]  # ranks 0 and 2, ranks 1 and 3
    assert results[0][2] == results[2][2] != results[1][2] == results[3][2]


def first_ranks_values() -> list:
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    model[1].running_mean += dist.get_rank()
    mine = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sharded = FSDP(model)
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    whole = sharded.gather_full_params() | dict(model.named_buffers())
    return [name for name in mine if not torch.equal(whole[name], everyones[0][name])]


def test_training_starts_from_the_first_ranks_values():
    assert run_ranks(3, first_ranks_values) == [[]] * 3
