"""What every strategy offers: switches, `no_sync`, the number of collectives, buffers, state dict."""

import inspect

import pytest
import torch
import torch.distributed as dist

from scratch_ddp.ddp import BucketedDDP, FlatDDP, OverlappedDDP, SimpleDistributedDataParallelism
from scratch_ddp.ddp.bucketed import Bucket, bucket_groups
from scratch_ddp.ddp.overlapped import OneGradient
from scratch_ddp.ddp.reducer import Reduction
from scratch_ddp.fsdp import FSDP
from scratch_ddp.instruments.traffic import traffic
from tests.ddp.cases import CASES, STRATEGIES, build, calls, gathered, mlp
from tests.ranks import run_ranks

each_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.__name__)
ONES = torch.ones(4, 6, dtype=torch.float64)


def count_a_step(strategy, case: str) -> list[dict]:
    """Collectives of building, of a step, of a micro-batch inside no_sync."""
    counts = []
    with traffic() as built:
        wrapped = strategy(build(CASES[case]))
    counts.append(calls(built))
    for inside in (False, True):
        with traffic() as step:
            if inside:
                with wrapped.no_sync():
                    wrapped(ONES).sum().backward()
                    wrapped.sync_gradients()
            else:
                wrapped(ONES).sum().backward()
                wrapped.sync_gradients()
        counts.append(calls(step))
    return counts


@pytest.mark.parametrize(
    "strategy, case, all_reduces",
    [
        (SimpleDistributedDataParallelism, "mlp", 4),
        (SimpleDistributedDataParallelism, "tied", 1),
        (SimpleDistributedDataParallelism, "frozen", 3),
        (SimpleDistributedDataParallelism, "several dtypes", 4),
        (SimpleDistributedDataParallelism, "empty parameter", 2),
        (SimpleDistributedDataParallelism, "unused", 2),
        (FlatDDP, "mlp", 1),
        (FlatDDP, "frozen", 1),
        (FlatDDP, "several dtypes", 2),
        (FlatDDP, "empty parameter", 1),
    ],
)
def test_collectives_of_a_step(strategy, case, all_reduces):
    for built, step, quiet in run_ranks(2, count_a_step, strategy, case):
        assert (built["all_reduce"], built["broadcast"]) == (0, 0), "set-up is counted apart"
        assert (step["all_reduce"], step["broadcast"], step["apart"]) == (all_reduces, 0, 1)
        assert quiet == {"all_reduce": 0, "broadcast": 0, "apart": 0}


def old_gradient_of_a_frozen_layer() -> tuple:
    wrapped = SimpleDistributedDataParallelism(build(CASES["mlp"]))
    wrapped(ONES).sum().backward()
    wrapped.module[0].requires_grad_(False)
    before = wrapped.module[0].weight.grad.clone()
    with traffic() as counts:
        wrapped.sync_gradients()
    return calls(counts)["all_reduce"], torch.equal(wrapped.module[0].weight.grad, before)


def test_what_a_frozen_layer_has_left_is_not_averaged():
    assert run_ranks(2, old_gradient_of_a_frozen_layer) == [(2, True)] * 2


def buffers_travel() -> tuple:
    wrapped = FlatDDP(build(CASES["BatchNorm"]))
    with traffic() as moved:
        wrapped(ONES * dist.get_rank()).sum().backward()
        wrapped.sync_gradients()
    mean = wrapped.module[1].running_mean.clone()
    wrapped.eval()
    with traffic() as still:
        wrapped(ONES).sum().backward()
        wrapped.sync_gradients()
    same = len({str(value) for value in gathered(mean.tolist())}) == 1
    return same, calls(moved)["apart"], calls(still)["apart"]


def test_buffers_travel_only_when_they_changed():
    # presence and the broadcasts of float64 statistics and int64 counter; presence alone in eval mode
    assert run_ranks(2, buffers_travel) == [(True, 3, 1)] * 2


def switches(strategy) -> None:
    wrapped = strategy(mlp())
    assert wrapped.do_sync is True
    with wrapped.no_sync():
        assert not wrapped.do_sync
        with wrapped.no_sync():
            assert not wrapped.do_sync
        assert not wrapped.do_sync, "the inner block must not switch on what the outer switched off"
    assert wrapped.do_sync
    with pytest.raises(KeyError), wrapped.no_sync():
        raise KeyError
    assert wrapped.do_sync, "restored after an exception"
    wrapped.disable_grad_sync()
    with wrapped.no_sync():
        pass
    assert not wrapped.do_sync, "restored to what it was, not to on"
    wrapped.enable_grad_sync()
    assert wrapped.do_sync
    with pytest.raises(AttributeError):
        wrapped.do_sync = False


@each_strategy
def test_switches_are_restored(strategy):
    run_ranks(1, switches, strategy)


def published_loops(strategy) -> tuple[float, float]:
    """Two ranks, gradients 5, 10 on rank 0 and 5, 10 on rank 1: sync at the last, and never (the slide's loop)."""
    results = []
    for step_inside in (False, True):
        wrapped = strategy(torch.nn.Linear(1, 1, bias=False))
        mine = torch.tensor([[5.0 * (dist.get_rank() + 1)]])
        with wrapped.no_sync():
            wrapped(mine).sum().backward()
            wrapped.sync_gradients()
            if step_inside:
                wrapped(mine).sum().backward()
                wrapped.sync_gradients()
        if not step_inside:
            wrapped(mine).sum().backward()
            wrapped.sync_gradients()
        results.append(wrapped.module.weight.grad.item() / 2)
    return tuple(results)


@each_strategy
def test_the_last_micro_batch_stands_outside_no_sync(strategy):
    assert run_ranks(2, published_loops, strategy) == [(7.5, 5.0), (7.5, 10.0)]


def as_a_module(strategy) -> None:
    model = build(CASES["BatchNorm"])
    wrapped = strategy(model)
    assert wrapped.module is model
    assert list(wrapped.state_dict()) == ["module." + name for name in model.state_dict()]
    assert [id(p) for p in wrapped.parameters()] == [id(p) for p in model.parameters()]
    assert torch.equal(wrapped.eval()(ONES), model(ONES)) and not model.training
    assert wrapped.train() is wrapped and model.training
    wrapped.remove_hooks()
    assert not wrapped.hook_handles


@each_strategy
def test_it_is_an_ordinary_module(strategy):
    run_ranks(1, as_a_module, strategy)


def test_model_and_module_are_one():
    def both():
        wrapped = SimpleDistributedDataParallelism(mlp())
        return wrapped.model is wrapped.module, [name for name, _ in wrapped.named_children()]

    assert run_ranks(1, both) == [(True, ["module"])]


SIMPLE = SimpleDistributedDataParallelism
TAUGHT = {
    "simple": [
        SIMPLE.__init__,
        SIMPLE.sync_gradients,
        SIMPLE.enable_grad_sync,
        SIMPLE.disable_grad_sync,
        SIMPLE.no_sync,
    ],
    "flat": [FlatDDP],
    "overlapped": [
        *(OneGradient.put, OverlappedDDP.make_buckets, OverlappedDDP.gradient_arrived, OverlappedDDP.sync_gradients),
        *(Reduction.add, Reduction._put, Reduction._start_next),
    ],
    "bucketed": [BucketedDDP.__init__, BucketedDDP.make_buckets, Bucket, bucket_groups],
}


def nothing_to_train(strategy) -> None:
    """A step of a model that has buffers and no parameters, and of one whose parameters are all frozen."""
    frozen = torch.nn.Linear(6, 2).requires_grad_(False)
    for model in (torch.nn.BatchNorm1d(6, affine=False), frozen):
        wrapped = strategy(model.double())
        with traffic() as counted:
            wrapped((dist.get_rank() + ONES).requires_grad_()).sum().backward()
            wrapped.sync_gradients()
        assert counted.payload_bytes <= 2 * 8 * 6 + 8  # of the buffers, two of which have six elements
        for buffer in model.buffers():
            assert torch.equal(*gathered(buffer))
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("strategy", [*STRATEGIES, FSDP], ids=lambda strategy: strategy.__name__)
def test_a_model_with_nothing_to_train(strategy):
    run_ranks(2, nothing_to_train, strategy)


@pytest.mark.parametrize("taught", TAUGHT.values(), ids=TAUGHT)
def test_what_is_taught_stays_short(taught):
    lines = [line for method in taught for line in inspect.getsource(method).splitlines() if line.strip()]
    assert len(lines) <= 40
