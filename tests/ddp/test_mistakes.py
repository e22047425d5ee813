"""What goes wrong is an error on every rank, which names rank and tensor, and no hang; the next step is right."""

import copy
import functools
import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from scratch_ddp import FSDP, BucketedDDP, FlatDDP, ShardedOptimizer
from scratch_ddp.ddp import SimpleDistributedDataParallelism
from scratch_ddp.zero import reduce_gradients
from tests.ddp.cases import HOOKED, STRATEGIES, mlp
from tests.ranks import RankFailed, assert_refused, in_turn, message_of, run_ranks


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(4, 6), *(nn.Linear(6, 6, bias=False) for _ in range(2)))


def backward(model: nn.Module, **options) -> None:
    model(torch.tensor([1, 1 + dist.get_rank()])).square().mean().backward(**options)


def step(wrapped) -> None:
    backward(wrapped)
    wrapped.sync_gradients()


def a_right_step(wrapped) -> bool:
    """Whether the next step gives the mean."""
    expected = FlatDDP(copy.deepcopy(wrapped.module))
    for each in (wrapped, expected):
        each.zero_grad()
        step(each)
    return all(torch.allclose(a.grad, b.grad) for a, b in zip(wrapped.parameters(), expected.parameters(), strict=True))


# Building a model.


def sharded(layer: nn.Module) -> FSDP:
    return FSDP(layer, dist.new_group([1], use_local_synchronization=True))


def of_layers(change: Callable[[nn.Module, nn.Module], dict[str, nn.Module] | None]):
    """Wrap two layers; `change`: what rank 1 makes of them."""

    def build() -> None:
        torch.manual_seed(0)
        parts = {"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)}
        parts = change(**parts) if dist.get_rank() == 1 else parts
        BucketedDDP(nn.ModuleDict(parts))

    return build


def of_values(change: Callable[[nn.Module], object]):
    """Wrap a model that has other values on rank 1, in the strategy that compares them."""

    def build() -> None:
        torch.manual_seed(0)
        model = mlp()
        model.register_buffer("count", torch.zeros(1, dtype=torch.int16))
        nn.init.zeros_(model[2].bias)
        if dist.get_rank() == 1:
            change(model)
        SimpleDistributedDataParallelism(model)

    return build


NOT_BUILT = [
    ("rank 1: entry 0 is parameter 'b.weight': float32 (3, 3), but", of_layers(lambda a, b: {"b": b, "a": a})),
    ("entry 2 is parameter 'b.weight': float32 (4, 3), but", of_layers(lambda a, b: {"a": a, "b": nn.Linear(3, 4)})),
    ("entry 2 is parameter 'b.weight': float16 (3, 3), but", of_layers(lambda a, b: {"a": a, "b": b.half()})),
    ("'b.weight': float32 (3, 3), frozen", of_layers(lambda a, b: {"a": a, "b": b.requires_grad_(False)})),
    ("entry 2 is parameter 'b.bias'", of_layers(lambda a, b: setattr(b, "weight", a.weight) or {"a": a, "b": b})),
    ("entry 4 is buffer 'b.c'", of_layers(lambda a, b: b.register_buffer("c", torch.ones(1)) or {"a": a, "b": b})),
    ("'b.weight' is a shard, so that ranks hold different", of_layers(lambda a, b: {"a": a, "b": sharded(b)})),
    (
        "rank 1: '0.bias' differs from rank 0's by 0.5: set the same seed",
        of_values(lambda model: model[0].bias.data[3].add_(0.5)),
    ),
    ("rank 1: '2.bias' differs from rank 0's by 0: set", of_values(lambda model: model[2].bias.data.neg_())),
    ("rank 1: 'count' differs from rank 0's by 1: set", of_values(lambda model: model.count.add_(1))),
]


def test_what_can_not_be_wrapped():
    assert_refused(2, NOT_BUILT)


def groups() -> str:
    FlatDDP(mlp(), DeviceMesh("cpu", [[0, 1]]))  # a dimension of size 1 does not count
    part = dist.new_group([0])
    return message_of(lambda: FlatDDP(mlp(), part))


def test_groups():
    with pytest.raises(RuntimeError, match="no process group yet: run under torchrun"):
        FlatDDP(mlp())
    inside, outside = run_ranks(2, groups)
    assert inside == "nothing was raised" and outside.startswith("rank 1 is not in the group")


# Steps.


def sparse(wrapped) -> None:
    wrapped.module[0].sparse = dist.get_rank() == 1
    step(wrapped)


def replaced(wrapped) -> None:
    if dist.get_rank() == 1:
        wrapped.module[1].weight = nn.Parameter(wrapped.module[1].weight.detach().clone())
    step(wrapped)


def own_buffer(wrapped) -> None:
    wrapped.module.register_buffer("longest", torch.zeros(1 + dist.get_rank()))
    step(wrapped)


def forgotten(wrapped, make=torch.optim.SGD) -> None:
    optimizer = make(wrapped.parameters(), lr=0.1)
    step(wrapped)
    optimizer.step()
    optimizer.zero_grad()
    backward(wrapped)
    optimizer.step()


def forgotten_on_rank_0(wrapped) -> None:
    """The other one had only gradients from inside no_sync."""
    with wrapped.no_sync():
        backward(wrapped)
    wrapped.sync_gradients() if dist.get_rank() else torch.optim.SGD(wrapped.parameters(), lr=0.1).step()


def in_a_hook(wrapped, before=False) -> None:
    """The optimizer steps with gradients that are this rank's own then; in a hook that was there `before` wrapping."""
    optimizers = {each: torch.optim.SGD([each], lr=0.1) for each in wrapped.parameters()}
    for each in wrapped.parameters():
        each.register_post_accumulate_grad_hook(lambda each: optimizers[each].step())
    if before:
        wrapped.remove_hooks()
        wrapped = type(wrapped)(wrapped.module)
    backward(wrapped)


def read_by(look: Callable[[nn.Module], object]):
    """Gradients on their way are read; the ranks synchronise nevertheless."""

    def do(wrapped) -> None:
        backward(wrapped)
        try:
            look(wrapped)
        finally:
            wrapped.sync_gradients()

    return do


def cleared_by(clear: Callable[[nn.Module], object]):
    """Gradients on their way are cleared on rank 1."""

    def do(wrapped) -> None:
        backward(wrapped)
        clear(wrapped) if dist.get_rank() == 1 else None
        wrapped.sync_gradients()

    return do


def interrupted(who: list[int], then: Callable[[nn.Module], object]):
    """Backward raises on some ranks; what they do afterwards. The others synchronise."""

    def raises(_):
        raise RuntimeError("this hook is broken")

    def do(wrapped) -> None:
        fails = dist.get_rank() in who
        broken = wrapped.module[1].weight.register_hook(raises) if fails else None
        said = message_of(lambda: backward(wrapped))
        assert said == ("this hook is broken" if fails else "nothing was raised"), said
        if fails:
            broken.remove()
        then(wrapped) if fails else wrapped.sync_gradients()

    return do


def without_memory(wrapped) -> None:
    """Rank 1 alone has gradients that come late, and the other rank has no room for any."""
    for _ in range(1 + dist.get_rank()):
        backward(wrapped)
    with pytest.MonkeyPatch.context() as patched:
        for name in ("empty_like", "zeros_like") if dist.get_rank() == 0 else ():
            patched.setattr(torch, name, lambda *_, **__: 1 / 0)
        wrapped.sync_gradients()


SHARDED = functools.partial(ShardedOptimizer, optimizer_cls=torch.optim.SGD)
NOT_SYNCHRONISED = "the optimizer steps with gradients that were not synchronised"
MISTAKES = [
    (sparse, "rank 1: the gradient of '0.weight' is sparse"),
    (
        lambda wrapped: (backward(wrapped, create_graph=dist.get_rank() == 1), wrapped.sync_gradients()),
        "rank 1: the gradient of '0.weight' has a graph of its own: no double backward",
    ),
    (replaced, "rank 1: parameters were added, removed, replaced or tied after the model was wrapped"),
    (own_buffer, "the ranks hold different buffers"),
    (forgotten, "ranks 0, 1: " + NOT_SYNCHRONISED),
    (functools.partial(forgotten, make=SHARDED), "ranks 0, 1: " + NOT_SYNCHRONISED),
    (forgotten_on_rank_0, "rank 0: " + NOT_SYNCHRONISED),
    (in_a_hook, "ranks 0, 1: " + NOT_SYNCHRONISED),
    (functools.partial(in_a_hook, before=True), "ranks 0, 1: " + NOT_SYNCHRONISED),
]
READ = "gradients are on their way between backward and sync_gradients(): use them after it"
CLEARED = "rank 1: gradients were cleared between backward and sync_gradients(), and"
UNFINISHED = "backward did not reach its end, so not all gradients are complete: repeat the step"
IN_BACKWARD = [  # of strategies that work from hooks
    (read_by(lambda wrapped: next(wrapped.parameters()).grad.norm()), READ),
    (read_by(lambda wrapped: nn.utils.clip_grad_norm_(wrapped.parameters(), 1e-3)), READ),
    (read_by(lambda wrapped: wrapped.zero_grad(set_to_none=False)), READ),
    (cleared_by(lambda wrapped: wrapped.zero_grad()), CLEARED),
    (cleared_by(lambda wrapped: setattr(wrapped.module[0].weight, "grad", None)), CLEARED),
    (cleared_by(lambda wrapped: (wrapped.zero_grad(), backward(wrapped))), CLEARED),
    (interrupted([0, 1], lambda wrapped: wrapped.sync_gradients()), "ranks 0, 1: " + UNFINISHED),
    (interrupted([0, 1], lambda wrapped: None), "nothing was raised"),
    (without_memory, "nothing was raised"),
    (interrupted([1], lambda wrapped: wrapped.sync_gradients()), "rank 1: " + UNFINISHED),
    (interrupted([1], lambda wrapped: wrapped(torch.tensor([1]))), "rank 1: " + UNFINISHED),
]


def wrong_step(strategy, do, says: str) -> None:
    wrapped = strategy(layers())
    said = message_of(lambda: do(wrapped))
    assert said.startswith(says), said
    assert getattr(do, "func", do) in (sparse, replaced, own_buffer, in_a_hook) or a_right_step(wrapped)


def test_steps_that_are_wrong():
    in_turn(2, wrong_step, [(strategy, *mistake) for strategy in STRATEGIES for mistake in MISTAKES])
    in_turn(2, wrong_step, [(strategy, *mistake) for strategy in HOOKED for mistake in IN_BACKWARD])


def intended(strategy) -> None:
    """Steps with gradients of which none waits for the other ranks."""
    wrapped = strategy(layers())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    if strategy is FlatDDP:
        sharded = ShardedOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.1)
        backward(wrapped)
        reduce_gradients(sharded)  # in place of sync_gradients
        sharded.step()
        sharded.zero_grad()
    with wrapped.no_sync():
        backward(wrapped)
        optimizer.step()  # by itself, as inside torch's DDP.no_sync()
    optimizer.zero_grad()
    with wrapped.no_sync():
        backward(wrapped)
    torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1).step()  # of another model
    optimizer.zero_grad()
    optimizer.step()  # of nothing
    wrapped.remove_hooks()
    backward(wrapped.module)
    optimizer.step()  # of an ordinary module


def test_steps_that_are_meant_to_be_taken():
    in_turn(2, intended, [(strategy,) for strategy in STRATEGIES])


def fewer_batches(strategy) -> None:
    wrapped = strategy(layers())
    for _ in range(2 - dist.get_rank()):
        step(wrapped)
    if dist.get_rank() == 1:
        os._exit(0)


@pytest.mark.parametrize("strategy", [BucketedDDP, FSDP])
def test_a_rank_that_runs_out_of_batches(strategy):
    with pytest.raises(RankFailed) as failed:
        run_ranks(2, fewer_batches, strategy)
    assert "Another rank has ended" in failed.value.failures[0] and "drop_last=True" in failed.value.failures[0]
