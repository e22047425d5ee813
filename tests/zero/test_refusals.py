"""What a sharded optimizer refuses, and ranks that disagree: one error on every rank, naming rank and parameter."""

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.optim import LBFGS, SGD, Muon

from scratch_ddp.fsdp import FSDP
from scratch_ddp.zero import ShardedOptimizer, reduce_gradients
from tests.ranks import assert_refused

DIFFERENT = "the ranks step with different gradients or options: average the gradients before step()"
SPARSE = "rank 1: the gradient of '0.weight' is sparse; only dense gradients"


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


def another_group() -> None:
    model = small()
    optimizer = ShardedOptimizer(model[0].named_parameters(), SGD)
    optimizer.add_param_group({"params": [("late", (model[1].weight, model[1].bias)[dist.get_rank()])]})


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


def overflow(_, model) -> None:
    model[0].weight.grad.fill_(torch.inf)


def scale_by_hand(optimizer) -> None:
    scaler = GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    reduce_gradients(optimizer)
    scaler.step(optimizer)


def clip_by_torch(optimizer) -> None:
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)


def step_in_a_hook() -> None:
    model = small()
    optimizer = ShardedOptimizer(model.named_parameters(), SGD)
    model[0].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    model(torch.full((1, 3), 1.0 + dist.get_rank())).sum().backward()


REFUSED = [
    ("LBFGS looks at all parameters at once", made_of(cls=LBFGS)),
    ("Muon only supports 2D parameters", made_of(cls=Muon)),
    ("rank 1: can't optimize a non-leaf", made_of(with_second(lambda weight: weight * 2), on=(1,))),
    ("go to an ordinary optimizer", lambda: ShardedOptimizer(FSDP(small()).named_parameters(), SGD)),
    ("every rank must hold the same values (set", made_of(with_second(lambda weight: weight.detach() + 1), on=(1,))),
    ("rank 1: entry 2 is 'late': float32 (3,), checksum", another_group),
    (SPARSE, step(sparse=True)),
    (SPARSE, step(sparse=True, reduces=True)),
    (DIFFERENT, step(lambda _, model: model[0].weight.grad[1, 1].add_(1e-3))),
    (DIFFERENT, step_in_a_hook),
    ("entry 2 is '0.weight': float32 (4, 3), gradient with", step(lambda _, model: model.zero_grad(), on=(0,))),
    ("rank 1: entry 1 is group 0", step(lambda optimizer, _: optimizer.param_groups[0].update(lr=0.3))),
    ("is a mean already, with more added to it: step and", step(reduces=True, then=reduce_gradients)),
    ("with a GradScaler, before unscale_()", step(overflow, then=scale_by_hand)),
    ("the norm of the gradients on this rank is not the norm of all", step(reduces=True, then=clip_by_torch)),
]


def test_what_is_refused_on_every_rank_alike():
    assert_refused(2, REFUSED)
