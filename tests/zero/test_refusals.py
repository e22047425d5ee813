"""What a sharded optimizer refuses, and ranks that disagree: one error on every rank, naming rank and parameter."""

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD, Muon

from scratch_ddp.fsdp import FSDP
from scratch_ddp.zero import ShardedOptimizer, reduce_gradients
from tests.ranks import run_ranks

OPTIONS = "the ranks step with different gradients or options: average the gradients before step()"


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def made_of(replace=lambda params: params, cls=SGD, on=(0, 1), **options):
    """Make an optimizer of what `replace` makes of a model's (name, parameter) pairs on these ranks."""

    def make() -> None:
        params = list(small().named_parameters())
        ShardedOptimizer(replace(params) if dist.get_rank() in on else params, cls, **options)

    return make


def with_second(parameter):
    """In place of the second weight."""
    return lambda params: [*params[:2], ("1.weight", parameter(params[2][1])), params[3]]


def with_group(late):
    def make() -> None:
        model = small()
        optimizer = ShardedOptimizer(model[0].named_parameters(), SGD)
        optimizer.add_param_group({"params": late(model)})

    return make


def step(before=lambda optimizer, model: None, on=(1,), reduces=False, then=ShardedOptimizer.step, **layer):
    """A step whose gradients are the same on every rank, but for what `before` does on these ranks."""

    def run() -> None:
        torch.manual_seed(0)
        mine = dist.get_rank() in on
        model = nn.Sequential(nn.Embedding(4, 3, **(layer if mine else {})), nn.Linear(3, 3))
        optimizer = ShardedOptimizer(model.named_parameters(), SGD, lr=0.1)
        model(torch.tensor([1, 2])).square().sum().backward()
        if mine:
            before(optimizer, model)
        if reduces:
            reduce_gradients(optimizer)
        then(optimizer)

    return run


def add_to_gradient(optimizer, model) -> None:
    model[0].weight.grad[1, 1] += 1e-3


def scale_by_hand(optimizer) -> None:
    scaler = GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    reduce_gradients(optimizer)
    scaler.step(optimizer)


def parameters_of(optimizer) -> list[torch.Tensor]:
    return optimizer.param_groups[0]["params"]


def step_in_a_hook() -> None:
    model = small()
    optimizer = ShardedOptimizer(model.named_parameters(), SGD)
    model[0].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    model(torch.full((1, 3), 1.0 + dist.get_rank())).sum().backward()


REFUSED = {
    "Muon of vectors": (made_of(cls=Muon), "Muon only supports 2D parameters"),
    "not a leaf": (made_of(with_second(lambda weight: weight * 2), on=(1,)), "rank 1: can't optimize a non-leaf"),
    "shards": (lambda: ShardedOptimizer(FSDP(small()).named_parameters(), SGD), "go to an ordinary optimizer"),
    "other values": (
        made_of(with_second(lambda weight: weight.detach() + 1), on=(1,)),
        "every rank must hold the same values (set the same seed, or wrap the model first",
    ),
    "another group": (
        with_group(lambda model: [("late", (model[1].weight, model[1].bias)[dist.get_rank()])]),
        "rank 1: entry 2 is 'late': float32 (3,), checksum",
    ),
    "sparse": (step(sparse=True), "rank 1: the gradient of '0.weight' is sparse; only dense gradients"),
    "not averaged": (step(add_to_gradient), OPTIONS),
    "only here": (
        step(lambda _, model: model.zero_grad(), on=(0,)),
        "rank 1: entry 2 is '0.weight': float32 (4, 3), gradient with checksum",
    ),
    "another rate": (step(lambda optimizer, _: optimizer.param_groups[0].update(lr=0.3)), "rank 1: entry 1 is group 0"),
    "in a backward hook": (step_in_a_hook, OPTIONS),
    "reduced and sparse": (step(sparse=True, reduces=True), "rank 1: the gradient of '0.weight' is sparse"),
    "reduced twice": (step(reduces=True, then=reduce_gradients), "is a mean already, with more added to it: step and"),
    "unscaled before it was reduced": (
        step(lambda _, model: model[0].weight.grad.fill_(torch.inf), then=scale_by_hand),
        "with a GradScaler, before unscale_()",
    ),
    "clipped by torch": (
        step(reduces=True, then=lambda optimizer: nn.utils.clip_grad_norm_(parameters_of(optimizer), 1.0)),
        "RuntimeError: the norm of the gradients on this rank is not the norm of all",
    ),
}


def message_of(attempt) -> str:
    """What it says when it refuses; nothing if it doesn't refuse."""
    try:
        attempt()
    except (ValueError, TypeError, RuntimeError) as error:
        dist.barrier()  # the group still works, and every rank got here
        return f"{type(error).__name__}: {error}"
    return ""


def test_what_is_refused_on_every_rank_alike():
    def each_in_turn():
        return [message_of(attempt) for attempt, _ in REFUSED.values()]

    answers = zip(*run_ranks(2, each_in_turn, timeout=60), strict=True)
    for (kind, (_, text)), said in zip(REFUSED.items(), answers, strict=True):
        assert len(set(said)) == 1 and text in said[0], (kind, said)
