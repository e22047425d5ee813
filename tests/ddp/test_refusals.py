"""Ranks that disagree, and what can't be averaged: an error on every rank that names rank and tensor, and no hang."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.ddp import FlatDDP, SimpleDistributedDataParallelism
from tests.ddp.cases import STRATEGIES, mlp
from tests.ranks import RankFailed, run_ranks

each_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.__name__)


def message_of(function, *args) -> str | None:
    """What `function` says when it refuses with ValueError; None if it doesn't refuse."""
    try:
        function(*args)
    except ValueError as error:
        dist.barrier()  # the group still works, and every rank got here
        return str(error)
    return None


def refused_everywhere(world_size, function, *args) -> str:
    """The one message that all ranks raise."""
    return the_same(run_ranks(world_size, message_of, function, *args, timeout=20))


def all_refused_everywhere(world_size, function, kinds) -> dict[str, str]:
    """For each kind of mistake, the one message that all ranks raise; the ranks are started once."""

    def each_in_turn():
        return [message_of(function, kind) for kind in kinds]

    messages = run_ranks(world_size, each_in_turn, timeout=30)
    return {kind: the_same(said) for kind, said in zip(kinds, zip(*messages, strict=True), strict=True)}


def the_same(messages) -> str:
    assert None not in messages, f"not every rank refuses: {messages}"
    assert len(set(messages)) == 1, f"the ranks say different things: {messages}"
    return messages[0]


def model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    layers = {"first": nn.Linear(3, 3), "second": nn.Linear(3, 3)}
    if kind == "order":
        layers = dict(reversed(layers.items()))
    elif kind == "more":
        layers["third"] = nn.Linear(3, 3)
    elif kind == "fewer":
        del layers["second"]
    elif kind == "shape":
        layers["second"] = nn.Linear(3, 4)
    elif kind == "dtype":
        layers["second"].half()
    elif kind == "frozen":
        layers["second"].weight.requires_grad_(False)
    elif kind == "tied":
        layers["second"].weight = layers["first"].weight
    elif kind == "buffer":
        layers["second"].register_buffer("scale", torch.ones(1))
    elif kind == "layout":
        layers["second"].weight = nn.Parameter(layers["second"].weight.detach().t())
    elif kind == "meta":
        layers["second"].to("meta")
    elif kind == "lazy":
        layers["second"] = nn.LazyLinear(3)
    return nn.ModuleDict(layers) if kind != "no module" else layers


STRUCTURES = {
    "order": "entry 0 is parameter 'second.weight': float32 (3, 3), but parameter 'first.weight': float32 (3, 3)",
    "more": "entry 4 is parameter 'third.weight': float32 (3, 3), but nothing more",
    "fewer": "entry 2 is nothing more, but parameter 'second.weight': float32 (3, 3)",
    "shape": "entry 2 is parameter 'second.weight': float32 (4, 3), but parameter 'second.weight': float32 (3, 3)",
    "dtype": "entry 2 is parameter 'second.weight': float16 (3, 3), but parameter 'second.weight': float32 (3, 3)",
    "frozen": "entry 2 is parameter 'second.weight': float32 (3, 3), frozen, but",
    "tied": "entry 2 is parameter 'second.bias'",
    "buffer": "entry 4 is buffer 'second.scale': float32 (1,), but nothing more",
    "layout": "entry 2 is parameter 'second.weight': float32 (3, 3), strides (1, 3), but",
    "meta": "'second.weight' is on the meta device and has no values",
    "lazy": "'second.weight' has no shape yet",
    "no module": "the model must be a torch.nn.Module, not dict",
}


@each_strategy
def test_another_structure_on_one_rank(strategy):
    def wrap(kind: str) -> None:
        strategy(model(kind if dist.get_rank() == 1 else "plain"))

    for kind, message in all_refused_everywhere(3, wrap, STRUCTURES).items():
        assert "rank 1: " + STRUCTURES[kind] in message
        assert "rank 2" not in message


def test_several_ranks_differ_from_rank_0():
    message = refused_everywhere(3, lambda: FlatDDP(model(["plain", "dtype", "more"][dist.get_rank()])))
    assert "rank 1: entry 2" in message and "rank 2: entry 4" in message


def unequal_values(what: str) -> None:
    torch.manual_seed(0)
    layers = mlp()
    with torch.no_grad():
        layers[2].weight[0, 0] = float("nan") if what == "same NaN" else 0.0
        if dist.get_rank() == 1:
            if what == "value":
                layers[0].bias[3] += 0.5
                layers[2].bias += 9
            elif what == "minus zero":
                layers[2].weight[0, 0] = -0.0
            elif what == "NaN":
                layers[2].weight[0, 0] = float("nan")
    if what == "buffer":
        layers.register_buffer("count", torch.tensor(dist.get_rank()))
    SimpleDistributedDataParallelism(layers)


@pytest.mark.parametrize(
    "what, says",
    [
        ("value", "rank 1: '0.bias' differs from rank 0's by up to 0.5: set the same seed"),
        ("minus zero", "rank 1: '2.weight' differs from rank 0's in bits alone (0.0 against -0.0)"),
        ("NaN", "rank 1: '2.weight' differs from rank 0's by up to nan"),
        ("buffer", "rank 1: 'count' differs from rank 0's by up to 1"),
    ],
)
def test_simple_verifies_the_values(what, says):
    assert says in refused_everywhere(2, unequal_values, what)


def test_simple_takes_the_same_nan_as_equal():
    assert run_ranks(2, message_of, unequal_values, "same NaN") == [None, None]


def seeds(strategy) -> list:
    torch.manual_seed(43 if dist.get_rank() == 0 else 42)
    return strategy(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))).state_dict()["module.0.weight"].tolist()


def test_flat_starts_from_rank_0():
    first, second, third = run_ranks(3, seeds, FlatDDP)
    torch.manual_seed(43)
    assert first == second == third == nn.Linear(2, 2).weight.tolist()


def spoil(strategy, fault: str) -> None:
    """Rank 1 alone does what can't be averaged."""
    torch.manual_seed(0)
    layers = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 3)})
    wrapped = strategy(layers)
    guilty = dist.get_rank() == 1
    layers["embed"].sparse = guilty and fault == "sparse"
    if guilty and fault == "replaced":
        layers["head"].weight = nn.Parameter(layers["head"].weight.detach().clone())
    if guilty and fault == "added":
        layers["extra"] = nn.Linear(3, 3)
    if guilty and fault == "cast":
        layers.double()
    if guilty and fault == "buffer":
        layers.register_buffer("late", torch.ones(1))
    loss = layers["head"](layers["embed"](torch.tensor([1, 2]))).pow(2).sum()
    loss.backward(create_graph=guilty and fault == "graph")
    wrapped.sync_gradients()


FAULTS = {
    "sparse": "the gradient of 'embed.weight' is sparse",
    "graph": "the gradient of 'embed.weight' has a graph of its own: no double backward",
    "replaced": "parameters were added, removed, replaced or tied after the model was wrapped",
    "added": "parameters were added, removed, replaced or tied after the model was wrapped",
    "cast": "'embed.weight' was torch.float32 when the model was wrapped and is torch.float64 now",
    "buffer": "buffers were added, removed or resized after the model was wrapped",
}


@each_strategy
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_what_cannot_be_averaged(strategy):
    for fault, message in all_refused_everywhere(2, lambda fault: spoil(strategy, fault), FAULTS).items():
        assert message.startswith("rank 1: " + FAULTS[fault])


def test_the_same_problem_is_said_once():
    message = refused_everywhere(3, lambda: FlatDDP(model("meta")))
    assert message.startswith("ranks 0, 1, 2: 'second.weight' is on the meta device")


def outside_the_group() -> str:
    group = dist.new_group([0, 1])
    try:
        FlatDDP(mlp(), group)
    except ValueError as error:
        return str(error)
    return "taken"


def test_a_rank_outside_the_group():
    inside, also, outside = run_ranks(3, outside_the_group)
    assert inside == also == "taken" and outside.startswith("rank 2 is not in the group")


def mesh_of_two_dimensions() -> str | None:
    from torch.distributed.device_mesh import DeviceMesh

    FlatDDP(mlp(), DeviceMesh("cpu", [[0, 1, 2, 3]]))  # a dimension of size 1 does not count
    return message_of(FlatDDP, mlp(), DeviceMesh("cpu", [[0, 1], [2, 3]]))


def test_a_mesh_of_two_dimensions():
    messages = run_ranks(4, mesh_of_two_dimensions)
    assert all(text and text.startswith("the mesh has 2 dimensions: pass the one") for text in messages)


def test_no_process_group():
    with pytest.raises(RuntimeError, match="no process group yet: run under torchrun"):
        FlatDDP(mlp())


def rank_1_never_comes() -> None:
    wrapped = FlatDDP(mlp())
    if dist.get_rank() == 0:
        copy.deepcopy(wrapped)  # a wrapper on the default group can be copied
        wrapped(torch.ones(1, 6)).sum().backward()
        wrapped.sync_gradients()


def test_a_rank_that_never_comes_is_reported_by_the_process_group():
    with pytest.raises(RankFailed) as failed:
        run_ranks(2, rank_1_never_comes, timeout=3)
    assert 0 in failed.value.failures
