"""Mistakes that would be silent on shards: a thrown-away gradient that comes back, a step without `sync_gradients`,
an optimizer or a clipping that looks at one rank's rows alone."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.fsdp import FSDP
from tests.ddp.cases import CASES, batches, build, one_process_step, shard
from tests.fsdp.cases import assert_equal, message_of
from tests.ranks import run_ranks

MLP = CASES["mlp"]
ANY = (ValueError, RuntimeError, TypeError)
SETTINGS = {"": {}, "replicated": {"replicated": ["0"]}}


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return MLP.loss(model, shard(x, dist.get_rank()), shard(y, dist.get_rank()))


def skipped_batch(under_no_sync: bool, set_to_none: bool, late: bool) -> None:
    """A batch whose gradients are NaN is skipped by the optimizer's `zero_grad`. The next step is as if it never was.

    `late`: only after the next forward pass.
    """
    for settings in SETTINGS.values():
        alone, sharded = build(MLP), FSDP(build(MLP), **settings)
        optimizer, plain = sgd(sharded.parameters()), sgd(alone.parameters())
        for step, (x, y) in enumerate(batches(3, 2)):
            bad = float("nan") * loss_of(sharded, x, y)
            if under_no_sync:
                with sharded.no_sync():
                    bad.backward()
                    sharded.sync_gradients()
            else:
                bad.backward()
            if not late:
                optimizer.zero_grad(set_to_none)
            loss = loss_of(sharded, x, y)
            if late:
                optimizer.zero_grad(set_to_none)
            loss.backward()
            sharded.sync_gradients()
            one_process_step(MLP, alone, x, y, 2)
            optimizer.step(), plain.step()
            assert_equal(sharded, alone, step)
            optimizer.zero_grad(set_to_none), plain.zero_grad(set_to_none)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "after the next forward"])
@pytest.mark.parametrize("under_no_sync", [False, True], ids=["", "no_sync"])
def test_zero_grad_throws_pending_gradients_away(under_no_sync, late):
    run_ranks(2, lambda: [skipped_batch(under_no_sync, set_to_none, late) for set_to_none in (True, False)])


def cleared_in_part() -> str:
    """Two optimizers: what one of them clears is gone, the other's waits; and a rank that clears alone is told."""
    alone, sharded = build(MLP), FSDP(build(MLP))
    parameters = dict(sharded.named_parameters())
    first = sgd([each for name, each in parameters.items() if name.startswith("0")])
    (x1, y1), (x2, y2) = batches(2, 2)
    loss_of(sharded, x1, y1).backward()
    first.zero_grad()
    loss_of(sharded, x2, y2).backward()
    sharded.sync_gradients()
    one_process_step(MLP, alone, x1, y1, 2)
    alone[0].zero_grad()
    one_process_step(MLP, alone, x2, y2, 2)
    assert_equal(sharded, alone)
    loss_of(sharded, x1, y1).backward()
    if dist.get_rank():
        first.zero_grad()
    return message_of(sharded.sync_gradients)


def test_what_is_cleared_in_part():
    for message in run_ranks(2, cleared_in_part):
        assert (
            "gradients cleared since backward: 0.bias, 0.weight, but gradients cleared since backward: none" in message
        )


def forgotten(**settings) -> list[str]:
    x, y = batches(1, 2)[0]
    said = []
    for case in ("always", "never left no_sync", "one rank"):
        sharded = FSDP(build(MLP), **settings)
        optimizer = sgd(sharded.parameters())
        other = sgd(nn.Linear(2, 2).parameters())
        if case == "never left no_sync":
            with sharded.no_sync():
                loss_of(sharded, x, y).backward()
                sharded.sync_gradients()
        else:
            loss_of(sharded, x, y).backward()
        other.step()  # of another model
        syncs = case == "one rank" and dist.get_rank() == 1
        said.append(message_of(sharded.sync_gradients if syncs else optimizer.step, ANY))
        optimizer.zero_grad()
        loss_of(sharded, x, y).backward()  # and it goes on from there
        sharded.sync_gradients()
        optimizer.step()
        alone = build(MLP)
        one_process_step(MLP, alone, x, y, 2)
        sgd(alone.parameters()).step()
        assert_equal(sharded, alone)
    return said


@pytest.mark.parametrize("settings", [{}, {"replicated": ["0", "1", "2"]}], ids=["", "replicated"])
def test_a_step_without_sync_gradients(settings):
    for always, never, one in run_ranks(2, lambda: forgotten(**settings)):
        assert always.startswith("ranks 0, 1: the optimizer steps with gradients that were not synchronised")
        assert never == always
        assert "rank 0 begins a step of the optimizer, rank 1 calls sync_gradients()" in one


class Lamb(torch.optim.Optimizer):
    """An optimizer that torch does not have: its step is scaled by norms of whole tensors."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.sub_(each.grad * (group["lr"] * each.norm() / each.grad.norm()))


REFUSED = {
    "Muon": lambda p: torch.optim.Muon([each for each in p if each.dim() == 2], lr=0.1),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1),
    "Adafactor": torch.optim.Adafactor,
    "Lamb": lambda p: Lamb(p, lr=0.1),
    "Lamb at a rate of 0": lambda p: Lamb(p, lr=0.0),
    "Lamb in one group": lambda p: Lamb([{"params": list(p), "lr": 0.1}], lr=0.0),
}
TAKEN = [
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.ASGD, torch.optim.Rprop, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta),
]


def optimizers() -> dict[str, str]:
    x, y = batches(1, 2)[0]
    sharded, whole = FSDP(build(MLP)), FSDP(build(MLP), replicated=["0", "1", "2"])
    said = {}
    for model in (sharded, whole):
        loss_of(model, x, y).backward()
        model.sync_gradients()
    for make in TAKEN:
        make(sharded.parameters(), lr=1e-9).step()
    for name, make in REFUSED.items():
        before = sharded.gather_full_params()
        optimizer = make(sharded.parameters())
        said[name] = message_of((lambda o=optimizer: o.step(lambda: 0.0)), ANY)
        assert all(torch.equal(before[name], now) for name, now in sharded.gather_full_params().items())
        if name != "LBFGS":
            make(whole.parameters()).step()  # of parameters that every rank has whole
    return said


def test_optimizers_that_look_at_more_than_single_elements():
    for said in run_ranks(2, optimizers):
        for name, message in said.items():
            assert message.startswith(f"{name.split()[0]} can't work on shards of parameters"), message


def after_the_group_is_gone() -> None:
    sharded, other = FSDP(build(MLP)), nn.Linear(2, 2)
    dist.destroy_process_group()
    other(torch.ones(1, 2)).sum().backward()
    sgd(other.parameters()).step()
    assert sharded is not None


def test_other_optimizers_step_when_the_group_is_gone():
    run_ranks(2, after_the_group_is_gone)


def clipping() -> list[str]:
    x, y = batches(1, 2)[0]
    sharded, said = FSDP(build(MLP)), []
    for foreach in (None, True, False):
        loss_of(sharded, x, y).backward()
        early = message_of(lambda: torch.nn.utils.clip_grad_norm_(sharded.parameters(), 1.0), ANY)
        sharded.sync_gradients()
        before = sharded.gather_full_grads()
        parameters = list(sharded.parameters())
        late = message_of(lambda p=parameters, f=foreach: torch.nn.utils.clip_grad_norm_(p, 1.0, foreach=f), ANY)
        said += [(early, late)]
        assert all(torch.equal(before[name], now) for name, now in sharded.gather_full_grads().items())
    torch.nn.utils.clip_grad_value_(sharded.parameters(), 1e-3)  # of single elements
    assert max(each.abs().max() for each in sharded.gather_full_grads().values()) == 1e-3
    sharded.clip_grad_norm_(1e-4)
    return said


def test_torchs_clipping_names_ours():
    for said in run_ranks(2, clipping):
        for early, late in said:
            assert "is not synchronised: call sync_gradients() after backward" in early
            assert "use clip_grad_norm_() of the FSDP in place of torch.nn.utils.clip_grad_norm_()" in late


def copies() -> list[str]:
    sharded = FSDP(build(MLP))
    ways = (pickle.dumps, copy.deepcopy, lambda model: torch.save(model, io.BytesIO()))
    return [message_of(lambda way=way: way(sharded), ANY) for way in ways]


def test_a_sharded_model_says_what_to_save():
    for messages in run_ranks(2, copies):
        for message in messages:
            assert "an FSDP can't be pickled or copied" in message and "save()" in message
