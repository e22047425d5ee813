"""The protocol that all wrappers share, on a sharded model: when gradients are synchronised, and what else there is."""

import contextlib

import pytest
import torch
import torch.distributed as dist

from scratch_ddp.fsdp import FSDP
from scratch_ddp.instruments.traffic import traffic
from tests.ddp.cases import CASES, batches, build, gathered, one_process_step, shard
from tests.fsdp.cases import assert_equal
from tests.ranks import run_ranks

MLP = CASES["mlp"]


def pair(case_name: str = "mlp", **settings) -> tuple[torch.nn.Module, FSDP]:
    return build(CASES[case_name]), FSDP(build(CASES[case_name]), **settings)


def backward(sharded: FSDP, x: torch.Tensor, y: torch.Tensor) -> None:
    rank = dist.get_rank()
    MLP.loss(sharded, shard(x, rank), shard(y, rank)).backward()


def accumulate(**settings) -> None:
    world_size = dist.get_world_size()
    alone, sharded = pair(**settings)
    data = batches(5, world_size)
    for window in (data[:3], data[3:]):  # the second window is the epoch's remainder
        for i, (x, y) in enumerate(window):
            one_process_step(MLP, alone, x, y, world_size)
            last = i + 1 == len(window)
            with contextlib.nullcontext() if last else sharded.no_sync(), traffic() as counted:
                backward(sharded, x, y)
                sharded.sync_gradients()
            assert counted.calls.get("reduce_scatter", 0) == (2 if last else 0)
        for model in (alone, sharded):
            torch.optim.SGD(model.parameters(), lr=0.1 / len(window)).step()
        assert_equal(sharded, alone)
        alone.zero_grad(), sharded.zero_grad()


@pytest.mark.parametrize("settings", [{}, {"free_after_forward": False}], ids=str)
def test_accumulation_equals_one_process(settings):
    run_ranks(3, lambda: accumulate(**settings))


def several_backwards(how: str) -> None:
    """Gradients add up over backward passes, with one synchronisation at the end, or one each."""
    alone, sharded = pair()
    for x, y in batches(3, 2):
        one_process_step(MLP, alone, x, y, 2)
        backward(sharded, x, y)
        if how == "each":
            sharded.sync_gradients()
    if how == "end":
        sharded.sync_gradients()
    assert_equal(sharded, alone)


@pytest.mark.parametrize("how", ["end", "each"])
def test_gradients_add_up(how):
    run_ranks(2, several_backwards, how)


def interleaved() -> None:
    """Forward, forward, then backward of the second and of the first; and one graph backwards twice."""
    alone, sharded = pair()
    (x1, y1), (x2, y2) = batches(2, 2)
    for model, rows in ((alone, lambda t: t), (sharded, lambda t: shard(t, dist.get_rank()))):
        first, second = (MLP.loss(model, rows(x), rows(y)) for x, y in ((x1, y1), (x2, y2)))
        second.backward(retain_graph=True)
        first.backward()
        second.backward()
    sharded.sync_gradients()
    assert_equal(sharded, alone)


def test_several_forwards_before_their_backwards():
    run_ranks(2, interleaved)


def switches() -> None:
    _, sharded = pair()
    x, y = batches(1, 2)[0]
    assert sharded.do_sync
    with sharded.no_sync():
        with sharded.no_sync():
            assert not sharded.do_sync
        assert not sharded.do_sync  # nested: off again, not on
    with contextlib.suppress(KeyError), sharded.no_sync():
        raise KeyError
    assert sharded.do_sync
    sharded.disable_grad_sync()
    backward(sharded, x, y)
    sharded.sync_gradients()
    for parameter in sharded.parameters():
        with pytest.raises(RuntimeError, match="is not synchronised: call sync_gradients"):
            parameter.grad.norm()
    sharded.enable_grad_sync()
    sharded.sync_gradients()  # what has accumulated
    alone = build(MLP)
    one_process_step(MLP, alone, x, y, 2)
    assert_equal(sharded, alone)
    with sharded.no_sync():
        backward(sharded, x, y)
    sharded.zero_grad()  # also what has accumulated
    sharded.sync_gradients()
    assert all(parameter.grad is None for parameter in sharded.parameters())


def test_the_switches():
    run_ranks(2, switches)


def evaluation() -> None:
    alone, sharded = pair("BatchNorm")
    x = batches(1, 1)[0][0]
    assert sharded.eval() is sharded and not sharded.module.training
    with torch.no_grad():
        torch.testing.assert_close(sharded(x), alone.eval()(x))
    with torch.inference_mode():
        torch.testing.assert_close(sharded(x), alone(x))
    assert sharded.train().module[1].training
    with torch.no_grad(), traffic() as counted:
        first = sharded.module[0](x)  # a unit by itself
    assert counted.calls == {"all_gather": 1}
    torch.testing.assert_close(first, alone[0](x).detach())
    sharded.module[0](x).sum().backward()
    sharded.sync_gradients()
    assert [gradient is None for gradient in sharded.gather_full_grads().values()] == [False] * 2 + [True] * 4


def test_evaluation_and_a_unit_by_itself():
    run_ranks(2, evaluation)


def freeze_later(who: str) -> None:
    alone, sharded = pair()
    for step, (x, y) in enumerate(batches(4, 2)):
        alone[0].requires_grad_(step < 2)  # frozen from the third step on
        layer = sharded.module[0] if who == "module" else dict(sharded.named_parameters())
        for each in [layer] if who == "module" else [layer["0.weight"], layer["0.bias"]]:
            each.requires_grad_(step < 2)
        alone.zero_grad(), sharded.zero_grad()
        one_process_step(MLP, alone, x, y, 2)
        backward(sharded, x, y)
        sharded.sync_gradients()
        assert_equal(sharded, alone, step)


@pytest.mark.parametrize("who", ["module", "shards"])
def test_a_layer_may_be_frozen_while_training(who):
    run_ranks(2, freeze_later, who)


def clip() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for norm_type in (2.0, 1.0, 3.0, float("inf")):
        alone, sharded = pair("BatchNorm", replicated=["1.weight"])
        x, y = batches(1, world_size)[0]
        one_process_step(CASES["BatchNorm"], alone, x, y, world_size)
        MLP.loss(sharded, shard(x, rank), shard(y, rank)).backward()
        sharded.sync_gradients()
        with traffic() as counted:
            norm = sharded.clip_grad_norm_(0.01, norm_type)
        assert counted.calls == {"all_reduce": 1} and len(set(gathered(norm.item()))) == 1
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01, norm_type))
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(sharded.gather_full_grads()[name], parameter.grad, rtol=0, atol=1e-12)
        before = sharded.gather_full_grads()
        sharded.clip_grad_norm_(1e9)
        assert all(torch.equal(before[name], gradient) for name, gradient in sharded.gather_full_grads().items())
    if rank == 0:
        next(sharded.parameters()).grad.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="norm of order 2.0 is nan"):
        sharded.clip_grad_norm_(1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_norm_of_gradients_in_shards(world_size):
    run_ranks(world_size, clip)


def removed() -> None:
    alone, sharded = pair("tied")
    sharded.remove_hooks()
    x, y = batches(1, 1)[0]
    for model in (alone, sharded.module):
        MLP.loss(model, x, y).backward()
    with traffic() as counted:
        for (name, parameter), other in zip(alone.named_parameters(), sharded.module.parameters(), strict=True):
            assert type(other) is torch.nn.Parameter, name
            torch.testing.assert_close(other.grad, parameter.grad)
    assert not counted.calls
    torch.optim.SGD(sharded.module.parameters(), lr=1.0).step()
    FSDP(sharded.module)  # and may be wrapped again


def test_hooks_can_be_removed():
    run_ranks(2, removed)
