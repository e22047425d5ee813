"""What a sharded optimizer refuses, and ranks that disagree: one error on every rank, naming rank and parameter."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import LBFGS, SGD, AdamW

from scratch_ddp.fsdp import FSDP
from scratch_ddp.zero import ShardedOptimizer
from tests.ranks import run_ranks
from tests.zero.cases import everything


def message_of(function, kind: str) -> str | None:
    """What `function` says when it refuses; None if it doesn't refuse."""
    try:
        function(kind)
    except (ValueError, TypeError) as error:
        dist.barrier()  # the group still works, and every rank got here
        return f"{type(error).__name__}: {error}"
    return None


def refused_everywhere(world_size: int, function, kinds) -> dict[str, str]:
    """For each kind of mistake, the one message that all ranks raise."""

    def each_in_turn():
        return [message_of(function, kind) for kind in kinds]

    said = {}
    for kind, messages in zip(kinds, zip(*run_ranks(world_size, each_in_turn, timeout=30), strict=True), strict=True):
        assert None not in messages, f"{kind}: not every rank refuses: {messages}"
        assert len(set(messages)) == 1, f"{kind}: the ranks say different things: {messages}"
        said[kind] = messages[0]
    return said


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


CLASSES = {
    "an instance": "TypeError: ranks 0, 1: give the class and its options, ShardedOptimizer(params, SGD, lr=…), not",
    "LBFGS": "TypeError: ranks 0, 1: LBFGS evaluates the loss several times a step and looks at all parameters at once",
    "no optimizer": "TypeError: ranks 0, 1: the second argument must be an optimizer class such as torch.optim.AdamW",
    "a name": "TypeError: ranks 0, 1: the second argument must be an optimizer class such as torch.optim.AdamW, not 'S",
    "itself": "TypeError: ranks 0, 1: a sharded optimizer can't be sharded again",
    "on rank 1": "TypeError: rank 1: LBFGS evaluates",
}


def with_class(kind: str) -> None:
    model = small()
    given = {
        "an instance": SGD(model.parameters()),
        "LBFGS": LBFGS,
        "no optimizer": nn.Linear,
        "a name": "SGD",
        "itself": ShardedOptimizer,
        "on rank 1": LBFGS if dist.get_rank() else SGD,
    }
    ShardedOptimizer(model.parameters(), given[kind])


def test_unfit_classes():
    for kind, message in refused_everywhere(2, with_class, CLASSES).items():
        assert message.startswith(CLASSES[kind])


PARAMETERS = {
    "a tensor": "ranks 0, 1: TypeError: give an iterable of parameters, such as model.parameters(), not a single",
    "nothing": "ranks 0, 1: the optimizer got an empty list",
    "no tensors": "ranks 0, 1: TypeError: optimizer can only optimize Tensors",
    "twice": "ranks 0, 1: '0.weight' is given twice",
    "not a leaf": "rank 1: can't optimize a non-leaf Tensor",
    "meta": "rank 1: '1.weight' is on the meta device and has no values",
    "lazy": "rank 1: '1.weight' has no shape yet",
    "a bad option": "ranks 0, 1: Invalid learning rate: -1",
    "an unknown option": "ranks 0, 1: TypeError: SGD.__init__() got an unexpected keyword argument 'lrr'",
    "fewer": "the ranks give the optimizer different parameters or options\n"
    "rank 1: entry 4 is nothing more, but '1.weight': float32 (3, 3) on rank 0",
    "another shape": "rank 1: entry 4 is '1.weight': float32 (2, 3), but '1.weight': float32 (3, 3) on rank 0",
    "another dtype": "rank 1: entry 4 is '1.weight': float16 (3, 3), but '1.weight': float32 (3, 3) on rank 0",
    "frozen": "rank 1: entry 2 is '0.weight': float32 (3, 3), frozen, but '0.weight': float32 (3, 3) on rank 0",
    "another option": "rank 1: entry 0 is options lr=0.2, but options lr=0.1 on rank 0",
    "other values": "rank 1: '1.bias' differs in value from that on rank 0: every rank must hold the same parameters",
    "a DTensor": "ranks 0, 1: '0.weight' is a DTensor, so sharded already",
}


def with_parameters(kind: str) -> None:
    model, guilty, options = small(), dist.get_rank() == 1, {"lr": 0.1}
    params = list(model.named_parameters())
    if kind in ("a tensor", "nothing", "no tensors"):
        params = {"a tensor": model[0].weight, "nothing": [], "no tensors": [1, 2]}[kind]
    elif kind == "twice":
        params = [{"params": params}, {"params": params[:1]}]
    elif kind == "a bad option":
        options = {"lr": -1}
    elif kind == "an unknown option":
        options = {"lrr": 1}
    elif kind == "a DTensor":
        from torch.distributed.fsdp import fully_shard

        params = list(fully_shard(model).named_parameters())
    elif guilty:
        if kind == "not a leaf":
            params[2] = ("1.weight", model[1].weight * 2)
        elif kind == "meta":
            params[2] = ("1.weight", model[1].weight.to("meta").detach().requires_grad_())
        elif kind == "lazy":
            params[2] = ("1.weight", nn.LazyLinear(3).weight)
        elif kind == "fewer":
            params = params[:2]
        elif kind in ("another shape", "another dtype"):
            other = nn.Linear(3, 2) if kind == "another shape" else nn.Linear(3, 3).half()
            params[2] = ("1.weight", other.weight)
        elif kind == "frozen":
            model[0].weight.requires_grad_(False)
        elif kind == "another option":
            options = {"lr": 0.2}
        elif kind == "other values":
            nn.init.ones_(model[1].bias)
    ShardedOptimizer(params, SGD, **options)


def test_unfit_or_different_parameters():
    for kind, message in refused_everywhere(2, with_parameters, PARAMETERS).items():
        assert PARAMETERS[kind] in message, (kind, message)
        assert message.startswith("ValueError: ")


STEPS = {
    "sparse": "rank 1: the gradient of '0.weight' is sparse; only dense gradients can be averaged",
    "not averaged": "rank 1: '0.weight' has a different gradient from that on rank 0, which updates it: "
    "average the gradients",
    "only here": "has a gradient here, but none on rank 0, which updates it: average the gradients before step()",
    "another rate": "the ranks step with different options; give schedulers the same numbers on every rank\n"
    "rank 1: entry 0 is group 0: dampening=0, differentiable=False, foreach=None, fused=None, lr=0.3",
    "cast": "rank 1: '0.weight' was torch.float32 (4, 3) when the optimizer was made and is torch.float64 (4, 3): make",
}


def step_with(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 3))
    optimizer = ShardedOptimizer(model.named_parameters(), SGD, lr=0.1)
    guilty = dist.get_rank() == 1
    if kind == "another rate":
        optimizer.param_groups[0]["lr"] = 0.3 if guilty else 0.1
    if kind == "cast" and guilty:
        model.double()
    model[0].sparse = guilty and kind == "sparse"
    model(torch.tensor([1, 2])).square().sum().backward()
    if kind == "not averaged" and guilty:
        model[0].weight.grad[1, 1] += 1e-3
    if kind == "only here":
        for parameter in model.parameters():
            parameter.grad = parameter.grad if guilty else None
    optimizer.step()


def test_gradients_that_were_not_averaged_and_other_surprises_of_a_step():
    for kind, message in refused_everywhere(2, step_with, STEPS).items():
        assert STEPS[kind] in message, (kind, message)


def the_unaveraged_case() -> list[str]:
    """What everybody forgets once: to average. In the first step, and in a later one."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = ShardedOptimizer(model.named_parameters(), AdamW)
    said = []
    for forgets in (True, False, True, False):
        model(torch.full((1, 3), 1.0 + dist.get_rank())).sum().backward()
        if not forgets:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        said.append(message_of(lambda _: optimizer.step(), ""))
        optimizer.zero_grad()
    return said


def test_forgotten_averaging_is_found_at_each_step_and_can_be_mended():
    for first, mended, later, again in run_ranks(3, the_unaveraged_case):
        for message in (first, later):
            assert "'weight' has a different gradient from that on rank 0" in message and "ranks 1, 2: " in message
        assert mended is again is None


def a_group_on_one_rank_only(kind: str) -> None:
    model = everything()
    optimizer = ShardedOptimizer(model.layers.parameters(), SGD)
    late = [("embed", model.embed.weight)] if kind == "named" else [model.embed.weight]
    if kind == "again":
        late = list(model.layers.parameters())
    if kind == "another" and dist.get_rank() == 1:
        late = [model.scalar]
    optimizer.add_param_group({"params": late})


def test_a_group_that_does_not_fit():
    messages = refused_everywhere(2, a_group_on_one_rank_only, ["named", "again", "another"])
    assert "names" in messages["named"]
    assert "parameter 0 of group 0 is given twice" in messages["again"]
    assert "rank 1: entry 2 is parameter 0 of group 0: float32 (), but parameter 0 of group 0" in messages["another"]


def shards_of_fsdp(_: str) -> None:
    ShardedOptimizer(FSDP(nn.Linear(4, 4)).named_parameters(), SGD)


def test_the_shards_of_fsdp_go_to_an_ordinary_optimizer():
    messages = refused_everywhere(2, shards_of_fsdp, ["shards"])
    assert "'weight' is a DTensor, so sharded already: give it to an ordinary optimizer" in messages["shards"]


def outside_the_group() -> str | None:
    group = dist.new_group([0, 1])
    try:
        ShardedOptimizer(small().parameters(), SGD, group)
    except ValueError as error:
        return str(error)
    return None


def test_a_rank_outside_the_group():
    inside, also, outside = run_ranks(3, outside_the_group)
    assert inside is also is None and outside.startswith("rank 2 is not in the group")


def test_no_process_group():
    with pytest.raises(RuntimeError, match="no process group yet"):
        ShardedOptimizer(small().parameters(), SGD)
