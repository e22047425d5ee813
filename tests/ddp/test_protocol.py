"""What every strategy offers: switches, `no_sync`, the number of messages and their order, groups, copies."""

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.ddp import BucketedDDP, FlatDDP, OverlappedDDP, SimpleDistributedDataParallelism
from scratch_ddp.fsdp import FSDP
from scratch_ddp.instruments.traffic import traffic
from tests.ddp.cases import CASES, STRATEGIES, build, calls, started
from tests.ranks import in_turn

WRAPPERS = [(wrap,) for wrap in (*STRATEGIES, FSDP)]
ONES = torch.ones(4, 6, dtype=torch.float64)


def collectives_of_a_step(strategy, case: str, all_reduces: int, in_backward: int = 0) -> None:
    with traffic() as built:
        wrapped = strategy(build(CASES[case]))
    with traffic() as step:
        with started() as sizes:
            wrapped(ONES).sum().backward()
        wrapped.sync_gradients()
    assert len(sizes) == in_backward
    with traffic() as quiet, wrapped.no_sync():
        wrapped(ONES).sum().backward()
        wrapped.sync_gradients()
    apart = calls(built)["apart"]
    assert calls(built) == {"all_reduce": 0, "broadcast": 0, "apart": apart} and apart <= 8, "counted apart"
    assert calls(step) == {"all_reduce": all_reduces, "broadcast": 0, "apart": 1}
    assert calls(quiet) == {"all_reduce": 0, "broadcast": 0, "apart": 0}


COUNTS = [
    (SimpleDistributedDataParallelism, "tied", 1),
    (SimpleDistributedDataParallelism, "frozen", 3),
    (FlatDDP, "several dtypes", 2),
    (OverlappedDDP, "mlp", 4, 4),
    (BucketedDDP, "mlp", 1, 1),
]


def test_collectives_of_a_step():
    in_turn(2, collectives_of_a_step, COUNTS)


def switches(strategy) -> None:
    model = build(CASES["BatchNorm"])
    names = list(model.state_dict())
    wrapped = strategy(model)
    assert wrapped.module is model
    assert list(wrapped.state_dict()) == [(strategy is not FSDP) * "module." + name for name in names]
    assert wrapped.do_sync is True
    with wrapped.no_sync():
        with wrapped.no_sync():
            assert not wrapped.do_sync
        assert not wrapped.do_sync, "the inner block must not switch on what the outer switched off"
    with pytest.raises(KeyError), wrapped.no_sync():
        raise KeyError
    assert wrapped.do_sync, "restored after an exception"
    wrapped.disable_grad_sync()
    with wrapped.no_sync():
        pass
    assert not wrapped.do_sync, "restored to what it was, not to on"
    wrapped.enable_grad_sync()
    assert wrapped.do_sync
    for quiet in (torch.no_grad, torch.inference_mode):
        with quiet():
            assert torch.equal(wrapped.eval()(ONES), model(ONES)) and not model.training


def test_an_ordinary_module_with_switches():
    in_turn(1, switches, WRAPPERS)


def backward(model: nn.Module, scale: float = 1.0) -> None:
    (model(ONES).sum() * scale).backward()


def hooks_and_copies(strategy) -> None:
    model, alone, rank = build(CASES["mlp"]), build(CASES["mlp"]), dist.get_rank()
    backward(alone)
    wrapped = strategy(model)
    backward(wrapped)
    wrapped.remove_hooks()  # in the middle of a step: it is given up
    wrapped.zero_grad()
    backward(model, rank)
    assert torch.equal(model[2].bias.grad, rank * alone[2].bias.grad), "the model is an ordinary one"
    wrapped.sync_gradients()  # goes on averaging
    assert torch.equal(model[2].bias.grad, 0.5 * alone[2].bias.grad)
    second = strategy(model)
    backward(copy.deepcopy(second.module), rank)  # a copy of the model has no hooks
    with pytest.raises(TypeError, match="can't be pickled or copied, since it belongs to a group of ranks: take its"):
        copy.deepcopy(second)
    if strategy not in STRATEGIES[:2]:
        with pytest.raises(ValueError, match="^ranks 0, 1: it is wrapped in .* already: call its"):
            strategy(model)
    del second
    gc.collect()
    with started() as sizes:
        backward(model)
    assert not sizes, "the hooks go with the wrapper"


def test_hooks_can_be_removed_and_models_copied():
    in_turn(2, hooks_and_copies, [(strategy,) for strategy in STRATEGIES])
