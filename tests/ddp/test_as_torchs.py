"""What people rely on in torch's DistributedDataParallel: the same values, situation by situation."""

import contextlib
import copy
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from scratch_ddp import BucketedDDP, OverlappedDDP
from tests.ddp.cases import CASES, NoGradient, build
from tests.ranks import run_ranks


class TwoOutputs(nn.Module):
    """Takes a nest and a keyword, returns a dict; `swallowed` gets an undefined gradient."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.swallowed = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, batch, *, scale):
        x = batch["x"][0] * scale
        return {"a": self.a(x), "rest": [self.b(x), NoGradient.apply(self.swallowed(x))]}


def x_of(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    return torch.randn(4, 6, generator=generator, dtype=torch.float64)


def plain_steps(wrap, sync) -> Iterator[object]:
    """Three steps of an optimizer that keeps zeroed gradients, then drops them."""
    model = wrap(build(CASES["mlp"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        model(x_of(step)).square().mean().backward()
        sync(model)
        optimizer.step()
        yield model
        optimizer.zero_grad(set_to_none=step == 1)


def accumulation(wrap, sync) -> Iterator[object]:
    """Under no_sync, then outside; then again without clearing; nested, and after an exception inside."""
    model = wrap(build(CASES["mlp"]))
    for _ in range(2):
        with contextlib.suppress(KeyError), model.no_sync():
            model(x_of(0)).mean().backward()
            sync(model)
            raise KeyError
        model(x_of(1)).mean().backward()
        sync(model)
        yield model


def parts_of_the_output(wrap, sync) -> Iterator[object]:
    """Ranks use different outputs, an undefined gradient among them; what no rank uses stays None."""
    torch.manual_seed(0)
    model = wrap(TwoOutputs().double())
    for step in range(3):
        output = model({"x": (x_of(step),)}, scale=2.0)
        parts = [output["a"], *output["rest"]]
        used = (parts[dist.get_rank()], parts[2], parts[0] + parts[2])[step]
        used.square().sum().backward()
        sync(model)
        yield model
        model.zero_grad()


def buffers(wrap, sync) -> Iterator[object]:
    """BatchNorm in training, then in evaluation."""
    model = wrap(build(CASES["BatchNorm"]))
    for step in range(2):
        model(x_of(step)).square().mean().backward()
        sync(model)
    yield [parameter.grad for parameter in model.parameters()]
    model.eval()
    with torch.no_grad():
        output = model(torch.ones(4, 6, dtype=torch.float64))
    yield [output] if dist.get_rank() == 0 else []  # torch gives the others the first rank's statistics one step later


def frozen_then_trained_part(wrap, sync) -> Iterator[object]:
    model = build(CASES["mlp"])
    model[0].requires_grad_(False)
    model = wrap(model)
    mse_loss(model(x_of(0)), x_of(1)).backward()
    sync(model)
    yield model


def shared_weights_and_checkpointing(wrap, sync) -> Iterator[object]:
    for case in ("tied", "checkpointing", "channels last", "transposed"):
        model = wrap(build(CASES[case]))
        CASES[case].loss(model, x_of(0), x_of(1)).backward()
        sync(model)
        yield model
        gradients = [(each.stride(), each.grad.stride()) for each in model.parameters()]
        assert all(mine == its for mine, its in gradients)


def saved_under_the_same_names(wrap, sync) -> Iterator[object]:
    """What torch's class has saved can be loaded."""
    saved = DistributedDataParallel(build(CASES["mlp"], seed=1)).state_dict()
    model = wrap(build(CASES["mlp"]))
    assert str(model.load_state_dict(saved)) == "<All keys matched successfully>"
    assert list(model.state_dict()) == list(saved)
    model(x_of(0)).sum().backward()
    sync(model)
    yield model


SITUATIONS = [
    *(plain_steps, accumulation, parts_of_the_output, buffers, frozen_then_trained_part),
    *(shared_weights_and_checkpointing, saved_under_the_same_names),
]


def tensors(seen: object) -> list[torch.Tensor | None]:
    if isinstance(seen, nn.Module):
        seen = [*seen.parameters(), *(parameter.grad for parameter in seen.parameters())]
    return [copy.deepcopy(each.detach()) if each is not None else None for each in seen]


def torchs(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=True)


def observed(situation: Callable, wrap: Callable, sync: Callable) -> list[list[torch.Tensor | None]]:
    return [tensors(seen) for seen in situation(wrap, sync)]


def every_situation() -> None:
    for situation in SITUATIONS:
        right = observed(situation, torchs, lambda model: None)
        for wrap in (BucketedDDP, OverlappedDDP):
            mine = observed(situation, wrap, lambda model: model.sync_gradients())
            for seen, expected in zip(mine, right, strict=True):
                for one, other in zip(seen, expected, strict=True):
                    told = f"{situation.__name__} with {wrap.__name__}"
                    assert (one is None) == (other is None), told
                    if one is not None:
                        torch.testing.assert_close(one, other, rtol=0, atol=1e-12, msg=told)


def test_the_same_in_every_situation():
    run_ranks(2, every_situation, timeout=30)
