"""The sharded optimizer does what the plain one does, bit for bit; what a rank keeps of the state, what it sends."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from scratch_ddp.common.tensors import LARGE
from scratch_ddp.instruments.traffic import traffic
from scratch_ddp.zero import ShardedOptimizer
from tests.ranks import in_turn, run_ranks
from tests.zero.cases import OPTIMIZERS, everything, full_state_dict, give_gradients, matrices, same, two_groups

FORMS = {"parameters": nn.Module.parameters, "groups": two_groups, "named": nn.Module.named_parameters}


def steps_as_the_plain_one(name: str, form) -> None:
    """Step both side by side."""
    cls, options = OPTIMIZERS[name]
    fused_sgd = name == "momentum, fused"  # torch's own: in bfloat16 two runs differ, and it wants every gradient
    form = matrices if name in ("Adafactor", "Muon") else form
    model, alone = (everything().float() if fused_sgd else everything() for _ in range(2))
    sharded, plain = ShardedOptimizer(form(model), cls, **options), cls(form(alone), **options)
    for step in range(3):
        give_gradients(step, model, alone, all_have=fused_sgd)
        for optimizer in (sharded, plain):
            optimizer.step()
            optimizer.zero_grad()
    whole = full_state_dict(sharded)
    assert same(dict(model.named_parameters()), dict(alone.named_parameters()))
    assert same(whole, plain.state_dict())
    assert all(sharded.owns(parameter) for parameter, entry in sharded.state.items() if entry)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_every_optimizer(n):
    cases = [(name, nn.Module.parameters) for name in OPTIMIZERS]
    in_turn(n, steps_as_the_plain_one, cases + [("AdamW, foreach", form) for form in FORMS.values()])


def schedulers(model, make) -> None:
    for schedule in (
        lambda optimizer: LambdaLR(optimizer, lambda steps: 1 / (steps + 1)),
        lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=6),  # the momentum too
    ):
        optimizer = make(two_groups(model), SGD, momentum=0.9)
        scheduler = schedule(optimizer)
        for step in range(4):
            give_gradients(step, model)
            optimizer.step()
            scheduler.step()


def a_group_added_later(model, make) -> None:
    optimizer = make(model.layers.parameters(), AdamW, lr=0.1)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": [model.embed.weight, model.frozen, model.transposed], "lr": 0.5})
            model.frozen.requires_grad_(True)  # after it was shared out
        give_gradients(step, model)
        optimizer.step()
        optimizer.zero_grad()


def own_strides(model, make) -> None:
    """One of several large parameters of an owner is transposed in memory on another rank."""
    model.large = nn.ParameterList(torch.ones(rows, 1024) for rows in (1024, 1024, 512, 384))
    if dist.get_rank() == 1:
        model.large[2].data = model.large[2].data.t().contiguous().t()
    optimizer = make(model.parameters(), SGD, lr=0.1)
    give_gradients(0, model, all_have=True)
    optimizer.step()


def a_closure(model, make) -> None:
    """It runs once, with gradients enabled, and its value is returned."""
    optimizer, calls = make(model.layers.parameters(), SGD, lr=0.1), []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = model.layers[0](torch.ones(1, 8)).square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure) > optimizer.step(closure)
    assert calls == [True, True]


def a_copy(model, make) -> None:
    """Copied together with the parameters, it goes on from where the first one was."""
    first = make(model.layers.parameters(), AdamW, lr=0.1)
    LambdaLR(first, lambda steps: 1.0)
    for step in range(2):
        give_gradients(step, model)
        first.step()
        model.layers, first = copy.deepcopy((model.layers, first))


def beside_the_plain_one(use) -> None:
    model, alone = everything(), everything()
    use(model, ShardedOptimizer)
    use(alone, lambda params, cls, **options: cls(params, **options))
    assert same(list(model.parameters()), list(alone.parameters()))


def test_used_as_the_plain_optimizer():
    in_turn(3, beside_the_plain_one, [(schedulers,), (a_group_added_later,), (own_strides,), (a_closure,), (a_copy,)])


def step_counted() -> tuple:
    model = everything()
    optimizer = ShardedOptimizer(model.parameters(), AdamW)
    for step in range(2):
        give_gradients(step, model, all_have=True)
        with traffic() as counted:
            optimizer.step()
        assert counted.setup.calls == {"all_reduce": 1} and counted.setup.payload_bytes == 24
    updated = [each for each in model.parameters() if each.requires_grad and each.numel()]
    large = [each for each in updated if each.nbytes >= LARGE]
    small = {(optimizer.owners[each], each.dtype) for each in updated if each.nbytes < LARGE}
    assert counted.calls == {"broadcast": len(large) + len(small)}
    state = sum(value.nbytes for entry in optimizer.state.values() for key, value in entry.items() if key != "step")
    return counted.wire_bytes, state, sum(each.nbytes for each in updated), max(each.nbytes for each in updated)


@pytest.mark.parametrize("n", [2, 4])
def test_a_step_costs_what_its_docstring_says_and_a_rank_keeps_an_nth_of_the_state(n):
    sent, states, (whole, *_), (largest, *_) = zip(*run_ranks(n, step_counted), strict=True)
    assert sum(sent) == (n - 1) * whole  # (n-1)/n of them a rank, on average
    assert sum(states) == 2 * whole and all(abs(state - 2 * whole / n) <= 2 * largest for state in states)
