"""The sharded optimizer does what the plain one does, bit for bit, and each rank keeps its share of the state."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from scratch_ddp.zero import ShardedOptimizer
from tests.ranks import run_ranks
from tests.zero.cases import OPTIMIZERS, everything, give_gradients, same, twin, two_groups

FORMS = {"parameters": nn.Module.parameters, "groups": two_groups, "named": nn.Module.named_parameters}


def steps_as_the_plain_one(name: str, form: str) -> list[str]:
    """Step both side by side; return what differs."""
    cls, options = OPTIMIZERS[name]
    fused_sgd = name == "momentum, fused"  # torch's own: in bfloat16 two runs differ, and it wants every gradient
    model, alone = (everything().float() if fused_sgd else everything() for _ in range(2))
    sharded, plain = ShardedOptimizer(FORMS[form](model), cls, **options), cls(FORMS[form](alone), **options)
    for step in range(3):
        give_gradients(step, model, alone, all_have=fused_sgd)
        for optimizer in (sharded, plain):
            optimizer.step()
            optimizer.zero_grad()
    whole = sharded.gather_full_state_dict()
    held = {
        "parameters": same(dict(model.named_parameters()), dict(alone.named_parameters())),
        "state": dist.get_rank() > 0 or same(whole, plain.state_dict()),
    }
    return [f"{name}, {form}: {what}" for what, holds in held.items() if not holds]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_optimizer(n):
    def all_of_them():
        cases = [(name, "parameters") for name in OPTIMIZERS] + [("AdamW, foreach", form) for form in FORMS]
        return sum((steps_as_the_plain_one(*case) for case in cases), [])

    assert run_ranks(n, all_of_them) == [[]] * n


def more_ranks_than_parameters() -> bool:
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight), nn.init.ones_(model.bias)
    alone = twin(model)
    sharded, plain = ShardedOptimizer(model.parameters(), AdamW), AdamW(alone.parameters())
    for step in (1, 2):
        give_gradients(step, model, alone)
        sharded.step(), plain.step()
    return same(list(model.parameters()), list(alone.parameters()))


def test_more_ranks_than_parameters():
    assert run_ranks(4, more_ranks_than_parameters) == [True] * 4


def elements_of_state(optimizer: torch.optim.Optimizer) -> int:
    return sum(value.numel() for entry in optimizer.state.values() for value in entry.values() if value.dim())


def shares_of_state() -> tuple[int, int, int]:
    model, alone = everything().float(), everything().float()
    sharded, plain = ShardedOptimizer(model.parameters(), AdamW), AdamW(alone.parameters())
    for parameter in [*model.parameters(), *alone.parameters()]:
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    sharded.step(), plain.step()
    largest = max(parameter.numel() for parameter in model.parameters())
    return elements_of_state(sharded), elements_of_state(plain), 2 * largest


@pytest.mark.parametrize("n", [2, 3, 4])
def test_each_rank_keeps_an_nth_of_the_state_to_within_the_largest_parameter(n):
    reports = run_ranks(n, shares_of_state)
    whole, largest = reports[0][1:]
    assert sum(mine for mine, _, _ in reports) == whole
    assert all(abs(mine - whole / n) <= largest for mine, _, _ in reports)


def with_schedulers() -> list[bool]:
    """Schedulers change the groups of the sharded optimizer, also the momentum; both end at the same bits."""
    outcomes = []
    for make in (
        lambda optimizer: LambdaLR(optimizer, lambda steps: 1 / (steps + 1)),
        lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=6),
    ):
        model, alone = everything(), everything()
        pair = [ShardedOptimizer(two_groups(model), SGD, momentum=0.9), SGD(two_groups(alone), momentum=0.9)]
        schedulers = [make(optimizer) for optimizer in pair]
        for step in range(4):
            give_gradients(step, model, alone)
            for optimizer, scheduler in zip(pair, schedulers, strict=True):
                optimizer.step()
                scheduler.step()
        outcomes.append(same(list(model.parameters()), list(alone.parameters())))
    return outcomes


def test_schedulers():
    assert run_ranks(3, with_schedulers) == [[True, True]] * 3


def with_a_group_added_later() -> bool:
    model, alone = everything(), everything()
    pair = []
    for each, make in ((model, lambda p: ShardedOptimizer(p, AdamW, lr=0.1)), (alone, lambda p: AdamW(p, lr=0.1))):
        early, late = list(each.layers.parameters()), [each.embed.weight, each.frozen, each.transposed]
        pair.append((make(early), late))
    for step in range(4):
        if step == 2:
            for optimizer, late in pair:
                optimizer.add_param_group({"params": late, "lr": 0.5})
            for each in (model, alone):
                each.frozen.requires_grad_(True)  # unfrozen after it was shared out
        give_gradients(step, model, alone)
        for optimizer, _ in pair:
            optimizer.step()
            optimizer.zero_grad()
    return same(list(model.parameters()), list(alone.parameters()))


def test_a_group_added_later_and_a_parameter_unfrozen():
    assert run_ranks(3, with_a_group_added_later) == [True] * 3


def with_a_closure() -> tuple:
    """The closure runs once, with gradients enabled, and its value is returned."""
    torch.manual_seed(0)
    model, calls, hooks = nn.Linear(3, 1), [], []
    optimizer = ShardedOptimizer(model.parameters(), SGD, lr=0.1)
    optimizer.register_step_post_hook(lambda *_: hooks.append(1))

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        first, second = optimizer.step(closure).item(), optimizer.step(closure).item()
    return calls, second < first, hooks


def test_a_closure():
    assert run_ranks(2, with_a_closure) == [([True, True], True, [1, 1])] * 2


def clears_gradients(set_to_none: bool) -> list:
    model = everything()
    optimizer = ShardedOptimizer(model.parameters(), AdamW, foreach=True)
    give_gradients(1, model)
    had = [parameter.grad is not None for parameter in model.parameters()]
    optimizer.zero_grad(set_to_none=set_to_none)
    left = [None if p.grad is None else p.grad.count_nonzero().item() for p in model.parameters()]
    return left == [0 if has and not set_to_none else None for has in had]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_clears_every_gradient(set_to_none):
    assert run_ranks(2, clears_gradients, set_to_none) == [True, True]


def over_a_dimension_of_a_mesh() -> tuple[bool, bool]:
    """Two pairs of ranks hold two models; each pair shares out its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(dist.get_rank() % 2)  # the same along dp
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    alone = twin(model)
    sharded, plain = ShardedOptimizer(model.parameters(), AdamW, mesh["dp"]), AdamW(alone.parameters())
    give_gradients(1, model, alone)
    sharded.step(), plain.step()
    refused = False
    try:
        ShardedOptimizer(model.parameters(), AdamW, mesh)
    except ValueError as error:
        refused = "2 dimensions" in str(error)
    return same(list(model.parameters()), list(alone.parameters())), refused


def test_a_dimension_of_a_mesh():
    assert run_ranks(4, over_a_dimension_of_a_mesh) == [(True, True)] * 4
