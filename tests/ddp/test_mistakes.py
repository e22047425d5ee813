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
from tests.ranks import RankFailed, run_ranks

hooked = pytest.mark.parametrize("strategy", HOOKED.values(), ids=HOOKED)
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.__name__)


def said_by(do: Callable[[], object]) -> str:
    """What `do` raises."""
    try:
        do()
    except (ValueError, RuntimeError, TypeError, ArithmeticError) as error:
        return str(error)
    return "nothing"


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


STRUCTURES = [  # what rank 1 makes of two layers, and what is said about it
    (lambda a, b: {"b": b, "a": a}, "entry 0 is parameter 'b.weight': float32 (3, 3), but parameter 'a.weight'"),
    (lambda a, b: {"a": a, "b": nn.Linear(3, 4)}, "entry 2 is parameter 'b.weight': float32 (4, 3), but param"),
    (lambda a, b: {"a": a, "b": b.half()}, "entry 2 is parameter 'b.weight': float16 (3, 3), but parameter 'b"),
    (lambda a, b: {"a": a, "b": b.requires_grad_(False)}, "entry 2 is parameter 'b.weight': float32 (3, 3), frozen"),
    (lambda a, b: setattr(b, "weight", a.weight) or {"a": a, "b": b}, "entry 2 is parameter 'b.bias'"),
    (lambda a, b: b.register_buffer("c", torch.ones(1)) or {"a": a, "b": b}, "entry 4 is buffer 'b.c': float32 (1,)"),
    (lambda a, b: {"a": a, "b": sharded(b)}, "'b' is sharded by FSDP, so that ranks hold different parameters: to"),
]


def sharded(layer: nn.Module) -> FSDP:
    return FSDP(layer, dist.new_group([1], use_local_synchronization=True))


def another_structure_on_one_rank(strategy) -> list[str]:
    said = []
    for change, _ in STRUCTURES:
        torch.manual_seed(0)
        parts = {"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)}
        parts = change(**parts) if dist.get_rank() == 1 else parts
        said.append(said_by(lambda parts=parts: strategy(nn.ModuleDict(parts))))
    return said


@pytest.mark.parametrize("strategy", [FlatDDP, BucketedDDP], ids=lambda strategy: strategy.__name__)
def test_another_structure_on_one_rank(strategy):
    first, *others = run_ranks(3, another_structure_on_one_rank, strategy)
    assert others == [first] * 2
    for said, (_, expected) in zip(first, STRUCTURES, strict=True):
        assert "rank 1: " + expected in said and "rank 2" not in said


def groups() -> list[str]:
    FlatDDP(mlp(), DeviceMesh("cpu", [[0, 1, 2, 3]]))  # a dimension of size 1 does not count
    wide, part = DeviceMesh("cpu", [[0, 1], [2, 3]]), dist.new_group([0, 1])
    return [said_by(lambda group=group: FlatDDP(mlp(), group)) for group in (wide, part)]


def test_groups():
    with pytest.raises(RuntimeError, match="no process group yet: run under torchrun"):
        FlatDDP(mlp())
    for rank, (wide, part) in enumerate(run_ranks(4, groups)):
        assert wide.startswith("the mesh has 2 dimensions: pass the one")
        assert part == "nothing" if rank < 2 else part.startswith(f"rank {rank} is not in the group")


VALUES = {
    "value": "rank 1: '0.bias' differs from rank 0's by 0.5: set the same seed",
    "minus zero": "rank 1: '2.weight' differs from rank 0's by 0: set",
    "buffer": "rank 1: 'count' differs from rank 0's by 1: set",
    "same NaN": "nothing",
}


def unequal_values() -> list[str]:
    said = []
    for what in VALUES:
        torch.manual_seed(0)
        parts = mlp()
        with torch.no_grad():
            parts[2].weight[0, 0] = float("nan") if what == "same NaN" else 0.0
            if dist.get_rank() == 1:
                parts[0].bias[3] += 0.5 * (what == "value")
                parts[2].weight[0, 0] *= -1 if what == "minus zero" else 1
        if what == "buffer":
            parts.register_buffer("count", torch.tensor(dist.get_rank()))
        said.append(said_by(lambda parts=parts: SimpleDistributedDataParallelism(parts)))
    return said


def test_simple_verifies_the_values():
    for said in run_ranks(2, unequal_values):
        assert all(text.startswith(start) for text, start in zip(said, VALUES.values(), strict=True)), said


# Steps.


def sparse(wrapped) -> None:
    wrapped.module[0].sparse = dist.get_rank() == 1
    step(wrapped)


def graph(wrapped) -> None:
    backward(wrapped, create_graph=dist.get_rank() == 1)
    wrapped.sync_gradients()


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


SHARDED = functools.partial(ShardedOptimizer, optimizer_cls=torch.optim.SGD)
NOT_SYNCHRONISED = "the optimizer steps with gradients that were not synchronised"
MISTAKES = [
    (sparse, "rank 1: the gradient of '0.weight' is sparse"),
    (graph, "rank 1: the gradient of '0.weight' has a graph of its own: no double backward"),
    (replaced, "rank 1: parameters were added, removed, replaced or tied after the model was wrapped"),
    (own_buffer, "the ranks hold different buffers"),
    (forgotten, "ranks 0, 1: " + NOT_SYNCHRONISED),
    (functools.partial(forgotten, make=SHARDED), "ranks 0, 1: " + NOT_SYNCHRONISED),
    (forgotten_on_rank_0, "rank 0: " + NOT_SYNCHRONISED),
    (in_a_hook, "ranks 0, 1: " + NOT_SYNCHRONISED),
    (functools.partial(in_a_hook, before=True), "ranks 0, 1: " + NOT_SYNCHRONISED),
]


@each_strategy
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_steps_that_are_wrong(strategy):
    def ranks():
        for do, says in MISTAKES:
            wrapped = strategy(layers())
            said = said_by(lambda do=do, wrapped=wrapped: do(wrapped))
            assert said.startswith(says), (do, said)
            assert getattr(do, "func", do) in (sparse, replaced, own_buffer, in_a_hook) or a_right_step(wrapped), do

    run_ranks(2, ranks)


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


@each_strategy
def test_steps_that_are_meant_to_be_taken(strategy):
    run_ranks(2, intended, strategy)


def touched(strategy) -> list[str]:
    """Rank 1 reads, clips or clears gradients before they are synchronised."""
    said, wrapped = [], strategy(layers())
    first = next(wrapped.parameters())
    for touch in (
        lambda: first.grad.norm(),
        lambda: nn.utils.clip_grad_norm_(wrapped.parameters(), 1e-3),
        lambda: wrapped.zero_grad(set_to_none=False),
        wrapped.zero_grad,
        lambda: setattr(first, "grad", None),
        lambda: (wrapped.zero_grad(), backward(wrapped)),
    ):
        backward(wrapped)
        if dist.get_rank() == 1:
            said.append(said_by(touch))
        if not (said and said[-1].startswith("rank 1: ")) or dist.get_rank() == 0:
            said.append(said_by(wrapped.sync_gradients))
        assert a_right_step(wrapped)
    return said


@hooked
def test_gradients_that_are_touched_on_their_way(strategy):
    first, second = run_ranks(2, touched, strategy)
    cleared = first[-1]
    assert cleared.startswith("rank 1: gradients were cleared between backward and sync_gradients(), and")
    assert first == ["nothing"] * 3 + [cleared] * 3
    read = "gradients are on their way between backward and sync_gradients(): use them after it"
    assert second == [read, "nothing"] * 3 + ["nothing", cleared] * 2 + [cleared]


def raises(_):
    raise RuntimeError("this hook is broken")


def backward_raises(strategy, who) -> list:
    wrapped, said = strategy(layers()), []
    for synchronise in (True, False):
        broken = wrapped.module[1].weight.register_hook(raises) if dist.get_rank() in who else None
        said.append(said_by(lambda: backward(wrapped)))
        if broken:
            broken.remove()
        if synchronise or dist.get_rank() not in who:
            said.append(said_by(wrapped.sync_gradients))
        elif len(who) == 1:  # and goes on without the others: they must hear of it
            said.append(said_by(lambda: wrapped(torch.tensor([1]))))
        assert a_right_step(wrapped)
    return said


@hooked
def test_a_backward_that_is_interrupted(strategy):
    broken, told = "this hook is broken", "backward did not reach its end, so not all gradients are complete: repeat "
    told = [f"rank{who}: {told}the step" for who in (" 1", "s 0, 1")]
    assert run_ranks(2, backward_raises, strategy, [0, 1]) == [[broken, told[1], broken]] * 2
    assert run_ranks(2, backward_raises, strategy, [1]) == [["nothing", told[0]] * 2, [broken, told[0]] * 2]


def fewer_batches(strategy) -> None:
    wrapped = strategy(layers())
    for _ in range(2 - dist.get_rank()):
        step(wrapped)
    if dist.get_rank() == 1:
        os._exit(0)


@pytest.mark.parametrize("strategy", [FlatDDP, BucketedDDP, FSDP], ids=lambda strategy: strategy.__name__)
def test_a_rank_that_runs_out_of_batches(strategy):
    with pytest.raises(RankFailed) as failed:
        run_ranks(2, fewer_batches, strategy)
    assert "Another rank has ended" in failed.value.failures[0] and "drop_last=True" in failed.value.failures[0]
