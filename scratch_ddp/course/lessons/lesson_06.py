"""Lesson 06, when ranks must talk: `no_sync` as a context manager, and an epoch whose last window is shorter."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

from scratch_ddp.course.compare import Words
from scratch_ddp.course.exercise import At, Exercise
from scratch_ddp.minimal.ddp import SimpleDistributedDataParallelism


def no_sync(model):
    """Return a context manager: in its `with` block, `model.do_sync` is False.

    After the block it is what it was before, however the block ends. Exceptions reach
    the caller. Use model.do_sync and model.disable_grad_sync().
    """

    @contextlib.contextmanager
    def block():
        # What comes before the caller's lines, what after? They run at `yield`.
        # answer: begin
        before = model.do_sync
        model.disable_grad_sync()
        try:
            yield
        finally:
            model.do_sync = before
        # answer: end

    return block()


def _endings(at: At) -> Iterator[tuple[str, tuple]]:
    model = SimpleDistributedDataParallelism(nn.Linear(2, 1))
    yield "a block", (model, True, None)
    yield "do_sync was False before", (model, False, None)
    yield "do_sync was False before, and an exception", (model, False, ValueError)
    yield "an exception in the block", (model, True, ValueError)
    yield "Stop in the block", (model, True, KeyboardInterrupt)


def _two_blocks(
    answer: Callable, model: nn.Module, before: bool, error: type[BaseException] | None
) -> Iterator[tuple[str, str, Any]]:
    """One block inside another, which then ends with `error`."""
    model.do_sync = before
    raised = "nothing"
    try:
        with answer(model):
            inside = model.do_sync
            with answer(model):
                pass
            between = model.do_sync
            if error:
                raise error
    except (ValueError, KeyboardInterrupt) as reached:
        raised = type(reached).__name__
    yield "value", "do_sync in the block", inside
    yield "restored", "do_sync after a block inside another", between
    yield "restored", "do_sync after the block", model.do_sync
    yield "exception", "what reaches the caller", Words(raised)


def train_epoch(model, optimizer, batches, n):
    """One epoch: a step after every n micro-batches, and one for those that remain.

    A step takes the gradient of the mean loss (mse_loss) over its window. `batches` is
    a list of (inputs, targets), all of one size; each has its own forward and backward.
    `model` has no_sync() and sync_gradients().
    Cost: for each step one sync, which is one all-reduce for each trainable parameter.
    """
    # How many micro-batches does the last window have?
    # answer: begin
    for i, (inputs, targets) in enumerate(batches):
        last = (i + 1) % n == 0 or i + 1 == len(batches)
        window = min(n, len(batches) - i // n * n)
        with contextlib.nullcontext() if last else model.no_sync():
            loss = mse_loss(model(inputs), targets) / window
            loss.backward()
            model.sync_gradients()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    # answer: end


def _epochs(at: At) -> Iterator[tuple[str, tuple]]:
    for batches, n in ((8, 4), (7, 4), (5, 1), (3, 4)):
        torch.manual_seed(0)
        model = SimpleDistributedDataParallelism(nn.Linear(3, 1).double())
        generator = torch.Generator().manual_seed(at.rank)
        data = [torch.randn(2, 4, generator=generator, dtype=torch.float64).split([3, 1], 1) for _ in range(batches)]
        case = f"{batches} micro-batches in windows of {n}"
        yield case, (model, torch.optim.SGD(model.parameters(), lr=0.1), data, n)


def _counted(
    answer: Callable, model: nn.Module, optimizer: torch.optim.Optimizer, batches: list, n: int
) -> Iterator[tuple[str, str, Any]]:
    """The steps' parameters, and how many passes there were."""
    weights, passes = [], {"forward": 0, "backward": 0}

    def count(way: str) -> None:
        passes[way] += 1

    optimizer.register_step_post_hook(lambda *_: weights.append(model.module.weight.detach().clone()))
    model.register_forward_hook(lambda *_: count("forward"))
    model.module.weight.register_hook(lambda _: count("backward"))
    answer(model, optimizer, batches, n)
    yield "value", "the number of steps", len(weights)
    for number, weight in enumerate(weights):
        yield "value", f"the weight after step {number}", weight
    for way, number in passes.items():
        yield "passes", f"the number of {way} passes", number
    yield "restored", "do_sync after the epoch", model.do_sync


EXERCISES = (
    Exercise(no_sync, _endings, use=_two_blocks, given="import contextlib"),
    Exercise(
        train_epoch,
        _epochs,
        use=_counted,
        close=1e-9,
        given="import contextlib\n\nfrom torch.nn.functional import mse_loss",
    ),
)
