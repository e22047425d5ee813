"""What can't be sharded, or must not be done with a sharded model, is refused in a sentence, on every rank alike."""

import copy
import functools
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.ddp import FlatDDP
from scratch_ddp.fsdp import FSDP
from tests.ddp.cases import batches, mlp
from tests.fsdp import cases as fsdp_cases
from tests.ranks import run_ranks

message_of = functools.partial(fsdp_cases.message_of, errors=(ValueError, TypeError, RuntimeError))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2))


UNWRAPPABLE = {
    "model must be a torch.nn.Module, not dict": lambda: FSDP({}),
    "'weight' has no shape yet": lambda: FSDP(nn.LazyLinear(2)),
    "units is empty: name the parts": lambda: FSDP(model(), units=[]),
    "units overlap: '1.0' lies inside '1'": lambda: FSDP(model(), units=["1", "1.0"]),
    "units overlap: '0' is given twice": lambda: FSDP(model(), units=["0", "0"]),
    "units overlap: '0' lies inside the whole model": lambda: (lambda m: FSDP(m, units=[m, m[0]]))(model()),
    "has nothing called 'nine'": lambda: FSDP(model(), units=["nine"]),
    "no module of the model is a Conv2d": lambda: FSDP(model(), units=[nn.Conv2d]),
    "a Linear that was given is not part of the model": lambda: FSDP(model(), units=[nn.Linear(2, 2)]),
    "modules are given by themselves, by their names or types, not by 3": lambda: FSDP(model(), units=[3]),
    "units must be a list: [0]": lambda: FSDP(model(), units="0"),
    "units must be a list of modules, names or module types, not 7": lambda: FSDP(model(), units=7),
    "unit 'blocks' is a ModuleList, which is never called": lambda: FSDP(
        nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(2, 2)])}), units=["blocks"]
    ),
    "has nothing called '0.wight'": lambda: FSDP(model(), replicated=["0.wight"]),
    "compute_dtype must be a floating-point dtype or None, not torch.int32": lambda: FSDP(
        model(), None, None, torch.int32
    ),
    "prefetch must be a number of units, 0 or more, not -1": lambda: FSDP(model(), prefetch=-1),
}


def refusals_of_wrapping(where: list[int]) -> dict[str, str]:
    mine = dist.get_rank() in where
    return {expected: message_of(wrap if mine else lambda: FSDP(model())) for expected, wrap in UNWRAPPABLE.items()}


@pytest.mark.parametrize(("where", "who"), [([0, 1], "ranks 0, 1: "), ([1], "rank 1: ")])
def test_what_can_not_be_wrapped(where, who):
    for said in run_ranks(2, refusals_of_wrapping, where):
        for expected, message in said.items():
            assert expected in message and message.startswith(who), message


def different_wrappings() -> list[str]:
    rank = dist.get_rank()
    size = nn.Sequential(nn.Linear(2, 2 + rank))
    other_hooks = model()
    FlatDDP(other_hooks)
    next(other_hooks.parameters()).register_post_accumulate_grad_hook(print)
    wrapped = FSDP(model())
    return [
        message_of(lambda: FSDP(wrapped.module)),
        message_of(lambda: FSDP(size)),
        message_of(lambda: FSDP(model(), units=["0"] if rank else ["1"])),
        message_of(lambda: FSDP(model(), prefetch=rank)),
        message_of(lambda: FSDP(model(), free_after_forward=bool(rank))),
        message_of(lambda: FSDP(model(), compute_dtype=torch.bfloat16 if rank else None)),
        message_of(lambda: FSDP(model(), replicated=["0"] if rank else [])),
        message_of(lambda: FSDP(other_hooks)),
    ]


def test_ranks_that_wrap_differently():
    for twice, size, units, prefetch, keep, dtype, replicated, hooks in run_ranks(2, different_wrappings):
        assert "'0.weight' is sharded already" in twice
        assert "rank 1: entry 0 is parameter '0.weight': float32 (3, 2), but" in size and "(2, 2) on rank 0" in size
        assert "is the root with 1.0.weight, 1.0.bias, 2.weight, 2.bias, but the root with 0.weight" in units
        assert "prefetch 1, but" in prefetch and "free_after_forward False, prefetch 1 on rank 0" in keep
        assert (
            "compute_dtype torch.bfloat16, free_after_forward True, prefetch 1, but sync call, compute_dtype None"
            in dtype
        )
        assert "is unit '0' with no parameters, but unit '0' with 0.weight, 0.bias on rank 0" in replicated
        assert "'0.weight' has hooks, of another wrapper perhaps" in hooks


def reading() -> dict[str, str]:
    sharded = FSDP(model())
    weight, inner, outer = sharded.module[0].weight, sharded.module, nn.Sequential(sharded)
    ways = {
        "add": lambda: weight + 1,
        "sum": lambda: weight.sum(),
        "item": lambda: weight[0, 0].item(),
        "data": lambda: weight.data,
        "detach": lambda: weight.detach(),
        "numpy": lambda: weight.numpy(),
        "tolist": lambda: weight.tolist(),
        "compare": lambda: weight == weight,
        "iterate": lambda: list(weight),
        "function": lambda: nn.functional.linear(torch.ones(1, 2), weight),
        "in a list": lambda: torch.cat([weight, weight]),
        "keyword": lambda: torch.add(torch.ones(2, 2), other=weight),
        "write": lambda: weight.fill_(0),
        "init": lambda: nn.init.zeros_(weight),
        "copy": lambda: copy.deepcopy(inner),
        "pickle": lambda: pickle.dumps(weight),
        "state dict": inner.state_dict,
        "load": lambda: inner.load_state_dict(model().state_dict()),
        "half": inner.half,
        "to": lambda: sharded.to(torch.float64),
        "optimizer": lambda: torch.optim.SGD(inner.parameters(), lr=1),
        "optimizer of an outer module": lambda: torch.optim.SGD(outer.parameters(), lr=1),
    }
    said = {way: message_of(read) for way, read in ways.items()}
    assert (weight.shape, weight.dtype, weight.numel(), weight.grad) == ((2, 2), torch.float32, 4, None)
    assert weight.requires_grad and "'0.weight' is freed" in repr(weight) and weight in {weight: 1}
    sharded(torch.ones(1, 2)).sum().backward()
    loading = message_of(lambda: outer.load_state_dict(outer.state_dict(), strict=False))
    assert "can't be loaded through a module that holds it: call its own load_state_dict()" in loading
    return said | {"after a pass": message_of(lambda: weight * 2)}


def test_reading_a_freed_parameter():
    for said in run_ranks(2, reading):
        for way, message in said.items():
            assert "parameter '0.weight' is freed" in message and "wrap the outermost one instead" in message, way


def optimizers() -> list[str]:
    plain, x = model(), torch.ones(1, 2)
    before = torch.optim.SGD(plain.parameters(), lr=0.1)
    sharded = FSDP(plain)
    sharded(x).sum().backward()
    sharded.sync_gradients()
    while_root_is_there = FSDP(nn.Sequential(nn.Linear(2, 2)), units=["0"])
    while_root_is_there(x)
    late = torch.optim.SGD(while_root_is_there.module.parameters(), lr=0.1)  # the last unit stays for backward
    return [message_of(before.step), message_of(late.step)]


def test_an_optimizer_made_from_whole_parameters():
    for messages in run_ranks(2, optimizers):
        for message in messages:
            assert "made from the whole parameter '0.weight'" in message and "after wrapping the model" in message


def changes_after_wrapping() -> list[str]:
    x = torch.ones(1, 2)

    def after(change) -> str:
        sharded = FSDP(model())
        change(sharded)
        return message_of(lambda: sharded(x).sum().backward())

    def between(sharded: FSDP) -> None:
        loss = sharded(x).sum()
        torch.optim.SGD(sharded.parameters(), lr=0.1)
        with torch.no_grad():
            next(sharded.parameters()).add_(1)
        loss.backward()

    return [
        after(lambda sharded: setattr(sharded.module[0], "weight", nn.Parameter(torch.ones(2, 2)))),
        after(lambda sharded: sharded.module[2].register_parameter("more", nn.Parameter(torch.ones(2)))),
        after(lambda sharded: setattr(next(sharded.parameters()), "data", torch.ones(3))),
        after(lambda sharded: sharded.module[0].register_buffer("count", torch.ones(1))),
        message_of(lambda: between(FSDP(model()))),
    ]


def test_changes_after_wrapping():
    for replaced, added, data, buffer, between in run_ranks(2, changes_after_wrapping):
        assert "replaced or tied after the model was wrapped" in replaced and "added" in added
        assert "the shard of '0.weight' has become torch.float32 (3,)" in data and "buffers were added" in buffer
        assert "changed between this forward pass and its backward pass" in between


def gradients_that_cannot_be_averaged() -> list[str]:
    sparse = FSDP(nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2)))
    sparse(torch.tensor([dist.get_rank()])).sum().backward()
    double, (x, _) = FSDP(mlp().double()), batches(1, 1)[0]
    double(x).sum().backward(create_graph=True)
    messages = [message_of(sparse.sync_gradients), message_of(double.sync_gradients)]
    double(x).sum().backward()  # and afterwards all is well
    double.sync_gradients()
    return messages


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_that_can_not_be_averaged():
    for sparse, double in run_ranks(2, gradients_that_cannot_be_averaged):
        assert "the gradient of '0.weight' is sparse" in sparse
        assert "has a graph of its own: no double backward" in double
