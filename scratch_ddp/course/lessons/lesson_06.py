"""Lesson 06, when ranks must talk: `no_sync` as a context manager, and an epoch whose last window is shorter."""

import contextlib

import torch
from torch import nn
from torch.nn.functional import mse_loss

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.guard import GRADIENTS, STATE, VALUES
from scratch_ddp.course.trial import Trial
from scratch_ddp.course.wording import difference
from scratch_ddp.minimal.ddp import SimpleDistributedDataParallelism


def no_sync(model):
    """Return a context manager: inside it `model.do_sync` is False, after it as it was before.

    However the block ends, also by Stop; and each model has a switch of its own.
    Use model.do_sync, model.disable_grad_sync() and model.enable_grad_sync().
    Cost: nothing is sent.
    """

    @contextlib.contextmanager
    def block():
        # What comes before the caller's lines, what after? `yield` stands where they run.
        # answer: begin
        before = model.do_sync
        model.disable_grad_sync()
        try:
            yield
        finally:
            if before:
                model.enable_grad_sync()
        # answer: end

    return block()


def _wrapped(inputs: int, device: torch.device) -> SimpleDistributedDataParallelism:
    """A linear model in float64 whose weights are the same on every rank; the caller's random numbers stay."""
    layer = nn.Linear(inputs, 1, dtype=torch.float64, device=device)
    for parameter in layer.parameters():
        nn.init.constant_(parameter, 0.5)
    return SimpleDistributedDataParallelism(layer)


def examine_no_sync(trial: Trial) -> None:
    """V and C inside the block; R after it: after an exception, in another block, where it was off before."""
    model = _wrapped(2, trial.device)
    own = torch.full((1, 2), trial.rank + 1.0, dtype=torch.float64, device=trial.device)
    inside = []

    def after(expected: bool) -> None:
        trial.criterion("restored", difference(model.do_sync, expected), "do_sync after the block")
        (model.enable_grad_sync if expected else model.disable_grad_sync)()  # the next case begins as it should

    def micro_batch(answer, model):
        with answer(model):
            inside.append(model.do_sync)
            model(own).sum().backward()
            model.sync_gradients()

    trial.call(model, case="a micro-batch", using=micro_batch, changes=[GRADIENTS, "do_sync"])
    trial.value(inside, [False], "do_sync in the block")
    trial.value(model.module.weight.grad, own, "the gradient")
    trial.cost(calls={})
    after(True)

    def failing(answer, model):
        with answer(model):
            raise ZeroDivisionError

    trial.call(model, case="an exception in the block", using=failing, changes=["do_sync"], raises="ZeroDivisionError")
    after(True)

    def nested(answer, model):
        with answer(model):
            with answer(model):
                pass
            inside.append(model.do_sync)

    trial.call(model, case="a block in a block", using=nested, changes=["do_sync"])
    trial.criterion("restored", difference(inside[1:], [False]), "do_sync after the inner block")
    after(True)

    def stopped(answer, model):
        with answer(model):
            raise Stopped

    trial.call(model, case="Stop in the block", using=stopped, changes=["do_sync"], raises="Stopped")
    after(True)

    def switched_off_later(answer, model):
        block = answer(model)
        model.disable_grad_sync()
        with block:
            pass

    trial.call(model, case="switched off between the call and the block", using=switched_off_later, changes=["do_sync"])
    after(False)
    model.enable_grad_sync()
    other = _wrapped(2, trial.device)

    def two_models(answer, model):
        with answer(model), answer(other):
            inside.append(other.do_sync)
        inside.append(other.do_sync)

    trial.call(model, case="two models", using=two_models, changes=["do_sync"])
    trial.criterion(
        "restored", difference(inside[2:], [False, True]), "the other model's do_sync in the block, after it"
    )
    after(True)
    model.disable_grad_sync()
    trial.call(model, case="switched off before", using=micro_batch, changes=[GRADIENTS, "do_sync"])
    after(False)


class Stopped(BaseException):
    """As KeyboardInterrupt: no Exception, so `except Exception` does not see it."""


NO_SYNC = Exercise(
    no_sync,
    examine_no_sync,
    given="import contextlib",
)


def train_epoch(model, optimizer, batches, n):
    """One epoch: a step after every n micro-batches, and one for those that remain at the end.

    Each step takes the gradient of the mean loss over all micro-batches of its window, on all
    ranks. `model` is a SimpleDistributedDataParallelism. `batches` is a list of (inputs, targets),
    all of one size, as many on every rank; the loss is mse_loss. Each micro-batch has a forward and
    a backward of its own, so that memory is needed for one at a time. A Stop ends the epoch.
    Cost: for each step one sync, which is one all-reduce per parameter.
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


def examine_train_epoch(trial: Trial) -> None:
    """V against one process that takes each window at once, over two epochs; A; C: one sync per step; R: do_sync."""
    for micro_batches, n in ((8, 4), (10, 4), (3, 4), (5, 1)):
        generator = torch.Generator().manual_seed(micro_batches)
        items = torch.randn(micro_batches, trial.size, 2, 4, generator=generator, dtype=torch.float64).to(trial.device)
        inputs, targets = items[..., :3], items[..., 3:]
        mine = [(inputs[i, trial.rank], targets[i, trial.rank]) for i in range(micro_batches)]
        model = _wrapped(3, trial.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        steps_taken = []
        optimizer.register_step_post_hook(lambda *_, steps_taken=steps_taken: steps_taken.append(1))
        passes = _Passes(model)
        expected = _wrapped(3, trial.device).module
        plain = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.5)
        for epoch in ("", ", second epoch"):
            case = f"{micro_batches} micro-batches, n={n}{epoch}"
            trial.call(model, optimizer, list(mine), n, case=case, changes=[VALUES, GRADIENTS, STATE, "do_sync"])
            _train_at_once(expected, plain, inputs.split(n), targets.split(n))
            trial.value(model.module.weight.detach(), expected.weight.detach(), "the weight", tolerance=1e-12)
            trial.agreement(model.module.weight)
            steps = -(-micro_batches // n)
            trial.criterion("passes", passes.complaint(micro_batches))
            complaint = f"is called {len(steps_taken)} times, should be {steps}" if len(steps_taken) != steps else ""
            trial.criterion("passes", complaint, "optimizer.step()")
            steps_taken.clear()
            trial.cost(calls={"all_reduce": steps * len(list(model.parameters()))})
            trial.criterion("restored", difference(model.do_sync, True), "do_sync after the epoch")

    model = _wrapped(3, trial.device)
    model.module.register_forward_pre_hook(_stop)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    changes = [VALUES, GRADIENTS, STATE, "do_sync"]
    trial.call(model, optimizer, list(mine), 4, case="Stop in a forward", changes=changes, raises="Stopped")


def _stop(*_: object) -> None:
    raise Stopped


class _Passes:
    """The order of a model's forward and backward passes, as "FBFB…"."""

    def __init__(self, model: nn.Module):
        self._order = ""
        model.module.register_forward_hook(self._forward)

    def _forward(self, _: nn.Module, args: tuple, output: torch.Tensor) -> None:
        self._order += "F"
        output.register_hook(self._backward)

    def _backward(self, _: torch.Tensor) -> None:
        self._order += "B"

    def complaint(self, micro_batches: int) -> str:
        """That there are not as many pairs as micro-batches; "" if there are. Begins anew."""
        order, self._order = self._order, ""
        if order == "FB" * micro_batches:
            return ""
        if order.count("F") != micro_batches:
            return f"{order.count('F')} forward passes for {micro_batches} micro-batches, should be one each"
        return "a forward pass begins before the backward pass of the one before"


def _train_at_once(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: tuple[torch.Tensor, ...],
    targets: tuple[torch.Tensor, ...],
) -> None:
    """What one process does that has room for a whole window of all ranks."""
    for window, wanted in zip(inputs, targets, strict=True):
        optimizer.zero_grad()
        mse_loss(model(window), wanted).backward()
        optimizer.step()


TRAIN_EPOCH = Exercise(
    train_epoch,
    examine_train_epoch,
    given="import contextlib\n\nfrom torch.nn.functional import mse_loss",
)
EXERCISES = (NO_SYNC, TRAIN_EPOCH)
