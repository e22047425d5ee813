"""Lesson 06, when ranks must talk: `no_sync` as a context manager, and an epoch whose last window is shorter."""

import builtins
import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.hooks import RemovableHandle

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.guard import GRADIENTS, STATE, VALUES
from scratch_ddp.course.trial import Trial
from scratch_ddp.course.wording import difference, times
from scratch_ddp.minimal.ddp import DataParallel, SimpleDistributedDataParallelism


def no_sync(model):
    """Return a context manager: in its `with` block, `model.do_sync` is False.

    After the block it is what it was when the block began, however the block ends; an exception,
    Stop too, reaches the caller. Nothing else of the model changes, and nothing of another model:
    blocks of two models may end in any order. Use model.do_sync and model.disable_grad_sync().
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
            model.do_sync = before
        # answer: end

    return block()


class _Wrapped(SimpleDistributedDataParallelism):
    """The values are the same on all ranks: it sends nothing to find that out."""

    def __init__(self, model: nn.Module):
        DataParallel.__init__(self, model)


class _Counted(_Wrapped):
    """Counts the calls of sync_gradients() that average. Has a tied weight, a frozen bias, a part in eval mode.

    In float64. The first layer is a wrapped model, too.
    """

    def __init__(self, device: torch.device):
        first, last = (nn.Linear(3, 3, dtype=torch.float64, device=device) for _ in range(2))
        last.weight = first.weight
        first.bias.requires_grad_(False)
        with torch.no_grad():
            for parameter in (first.weight, first.bias, last.bias):
                parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).view_as(parameter))
        super().__init__(nn.Sequential(_Wrapped(first), nn.Tanh().eval(), last))
        self._syncs = 0
        self.before_sync: Callable[[], None] | None = None  # is called before each that averages

    def sync_gradients(self) -> None:
        if self.do_sync and self.before_sync:
            self.before_sync()
        self._syncs += self.do_sync
        super().sync_gradients()

    def syncs(self) -> int:
        """How many there were since this was last asked."""
        syncs, self._syncs = self._syncs, 0
        return syncs


class SomeError(KeyError, IndexError, torch.OutOfMemoryError, AssertionError, ValueError, ZeroDivisionError, TypeError):
    """What `except` with any of these classes would catch."""


class Stop(KeyboardInterrupt):
    """As the interrupt: no Exception, so `except Exception` does not catch it."""


def _exceptions() -> list[BaseException]:
    """One of each class that Python has, but for those that need arguments, and of the two above."""
    found = [SomeError(), Stop()]
    for kind in vars(builtins).values():
        if isinstance(kind, type) and issubclass(kind, BaseException):
            with contextlib.suppress(TypeError):
                found.append(kind())
    return found


def _ending(run: Callable, error: BaseException) -> str:
    """What is wrong with the end of run(), in which `error` is raised; "" if it reaches the caller."""
    try:
        run()
    except type(error) as raised:
        return "" if raised is error else f"raised another {type(error).__name__} than the one in the block"
    return f"returned, should raise {type(error).__name__}"


def examine_no_sync(trial: Trial) -> None:
    """V and C inside the block; R after it: however it ends, whatever the flag was, in blocks of two models."""
    model = _Counted(trial.device)
    other = model.module[0]
    own = torch.full((1, 3), trial.rank + 1.0, dtype=torch.float64, device=trial.device)
    model(own).sum().backward()
    trained = model.trained()
    mine = list(torch.autograd.grad(model(own).sum(), trained))

    def flags_after(answer: Callable, lines: Callable, before: bool) -> tuple[Any, bool, bool]:
        """What lines(answer) returns, and both flags after it. They are `before` at first, and shall stay so."""
        model.do_sync = other.do_sync = before
        return lines(answer), model.do_sync, other.do_sync

    def judge(flags: tuple[Any, bool, bool], before: bool) -> Any:
        for flag, whose in zip(flags[1:], ("", "the other model's "), strict=True):
            trial.criterion("restored", difference(flag, before), f"{whose}do_sync after the block")
        return flags[0]

    def micro_batch(answer: Callable) -> list[bool]:
        model.zero_grad()
        with answer(model):
            flags = [model.do_sync, other.do_sync]
            model(own).sum().backward()
            model.sync_gradients()
        return flags

    def sync_after(answer: Callable) -> None:
        with answer(model):
            pass
        model.enable_grad_sync()
        if all(parameter.grad is not None for parameter in trained):  # else that is the complaint
            model.sync_gradients()

    for case, lines, before, syncs in (
        ("a micro-batch", micro_batch, True, 0),
        ("a micro-batch, switched off before", micro_batch, False, 0),
        ("a sync after the block", sync_after, True, 1),
    ):
        using = functools.partial(flags_after, lines=lines, before=before)
        flags = judge(trial.call(case=case, using=using, beside=[model], changes=["do_sync", GRADIENTS]), before)
        trial.cost(calls={"all_reduce": syncs * len(trained)}, exactly=True)
        if lines is micro_batch:
            trial.value(flags[:1], [False], "do_sync in the block")
            trial.value(flags[1:], [before], "in the block, the do_sync of another model, a part of this one")
            trial.value([parameter.grad for parameter in trained], mine, "the gradient")
    if not trial.on_all_ranks:  # the rest does not depend on the number of ranks
        return
    blocks = _Blocks(model, other)
    cases = {case: (lines, before) for case, (lines, before, *_) in blocks.cases.items()}
    flags = trial.call_each(cases, using=flags_after, beside=[model], changes=["do_sync"])
    for (_, before, expected, what), found in zip(blocks.cases.values(), flags, strict=True):
        inside = judge(found, before)
        if what:
            trial.criterion("restored", difference(inside, expected), what)
            continue
        for error, complaint, flag in inside or ():
            trial.criterion("value", complaint)
            trial.criterion("restored", difference(flag, True), f"do_sync after {error} in the block")
    trial.cost(calls={})


class _Blocks:
    """Blocks in which nothing is sent. `cases`: lines(answer), do_sync before, what the lines should return, of what.

    Where it is not said of what, the lines return what is wrong.
    """

    def __init__(self, model: _Counted, other: _Wrapped):
        self._model, self._other = model, other
        of_both = "do_sync of both, after the first block ended and after the second"
        self.cases = {
            "an exception in the block": (self._failing, True, None, ""),
            "a block in a block": (
                self._nested,
                True,
                [False, True, True],
                "do_sync after the first and the second inner block, and after the outer one",
            ),
            "switched off between the call and the block": (self._switched_off_later, False, None, ""),
            "switched off before, switched on in the block": (self._switched_on_inside, False, None, ""),
            "blocks of two models, the second one's flag off before": (
                self._two_models,
                True,
                [[True, False], [True, False]],
                of_both,
            ),
            "model.training is set to False in the block": (
                self._eval_inside,
                True,
                False,
                "model.training after the block",
            ),
        }

    def _failing(self, answer: Callable) -> list[tuple[str, str, bool]]:
        found = []
        for error in _exceptions():

            def run(error: BaseException = error) -> None:
                with answer(self._model):
                    raise error

            found.append((type(error).__name__, _ending(run, error), self._model.do_sync))
            self._model.enable_grad_sync()
        return found

    def _nested(self, answer: Callable) -> list[bool]:
        found = []
        with answer(self._model):
            for switched_on in (False, True):
                if switched_on:
                    self._model.enable_grad_sync()
                with answer(self._model):
                    pass
                found.append(self._model.do_sync)
        return [*found, self._model.do_sync]

    def _switched_off_later(self, answer: Callable) -> None:
        self._model.enable_grad_sync()
        block = answer(self._model)
        self._model.disable_grad_sync()
        with block:
            pass

    def _switched_on_inside(self, answer: Callable) -> None:
        with answer(self._model):
            self._model.enable_grad_sync()

    def _two_models(self, answer: Callable) -> list[list[bool]]:
        self._other.disable_grad_sync()
        blocks, found = [answer(self._model), answer(self._other)], []
        for block in blocks:
            block.__enter__()
        for block in blocks:
            block.__exit__(None, None, None)
            found.append([self._model.do_sync, self._other.do_sync])
        self._other.enable_grad_sync()
        return found

    def _eval_inside(self, answer: Callable) -> bool:
        with answer(self._model):
            self._model.training = False
        training, self._model.training = self._model.training, True
        return training


NO_SYNC = Exercise(
    no_sync,
    examine_no_sync,
    given="import contextlib",
)


def train_epoch(model, optimizer, batches, n):
    """One epoch: a step after every n micro-batches, and one for those that remain at the end.

    Each step takes the gradient of the mean loss over all micro-batches of its window, on all
    ranks. `model` is a SimpleDistributedDataParallelism, whose sync_gradients() averages;
    `optimizer` has all its trainable parameters. `batches` is a list of (inputs, targets), perhaps
    empty, all of one size, as many on every rank; the loss is mse_loss. Each micro-batch has one
    forward and one backward of its own, and none of its tensors is kept for the next ones. Before
    and after the epoch gradients are None or zero and do_sync is True. An exception of any call,
    Stop too, reaches the caller, with no step for its window; do_sync is True then as well.
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


def examine_train_epoch(trial: Trial) -> None:
    """V against one process that takes each window at once; A; M; C: one sync per step; R: do_sync, after Stop too."""
    many = 17 + trial.seed % 8
    cases = [(8, 4, 1), (6, 4, 2), (3, 4, 1), (2, 1, 1), (0, 3, 1), (many + 1, many, 1)]
    for micro_batches, n, epochs in cases if trial.on_all_ranks else cases[2:4]:
        drawn = f", drawn with seed {trial.seed}" if n == many else ""
        case = f"{micro_batches} micro-batches, n={n}{drawn}"
        epoch = _Epoch(trial, micro_batches, n)
        for each in range(epochs):
            epoch.examine(f"{case}{', second epoch' if each else ''}")
    if not trial.on_all_ranks:  # the rest does not depend on the number of ranks
        return
    epoch = _Epoch(trial, 2, 2)
    epoch.targets[0, 0, 0, 0] = torch.nan
    epoch.examine("2 micro-batches, n=2, a target is NaN")
    _Epoch(trial, 8, 4).examine_stopped()


class _Epoch:
    """Micro-batches, a model and an optimizer for the answer, and the same for one process that has all of them."""

    changes = VALUES, GRADIENTS, STATE, "do_sync"

    def __init__(self, trial: Trial, micro_batches: int, n: int):
        self._trial, self._micro_batches, self._n = trial, micro_batches, n
        self._steps = -(-micro_batches // n)
        generator = torch.Generator().manual_seed(trial.seed + micro_batches if n > 5 else micro_batches)
        items = torch.randn(micro_batches, trial.size, 2, 6, generator=generator, dtype=torch.float64)
        self._inputs, self.targets = items.to(trial.device).split(3, dim=-1)
        self.model, alone = _Counted(trial.device), _Counted(trial.device)
        self._alone = alone.module
        self._optimizer, self._plain = (
            torch.optim.SGD(each.trained(), lr=0.1, momentum=0.5) for each in (self.model, alone)
        )
        self._passes, self._steps_taken = _Passes(self.model), []
        self._optimizer.register_step_post_hook(lambda *_: self._steps_taken.append(1))

    def _call(self, case: str, using: Callable | None = None) -> None:
        mine = list(zip(self._inputs[:, self._trial.rank], self.targets[:, self._trial.rank], strict=True))
        given = self.model, self._optimizer, mine, self._n
        self._trial.call(*given, case=case, changes=self.changes, using=using)

    def examine(self, case: str) -> None:
        """The answer's epoch, and what must hold after it."""
        trial, model, steps = self._trial, self.model, self._steps
        self._call(case)
        self._train_at_once()
        expected = dict(self._alone.named_parameters())
        for name, parameter in model.module.named_parameters():
            trial.value(parameter.detach(), expected[name].detach(), f"the parameter {name!r}", tolerance=1e-12)
            left = parameter.grad is not None and bool(parameter.grad.count_nonzero())
            trial.criterion("value", "is not clear after the epoch" if left else "", f"the gradient of {name!r}")
        trial.agreement(list(model.module.parameters()))
        trial.criterion("passes", self._passes.complaint(self._micro_batches))
        trial.criterion("passes", self._called(len(self._steps_taken), steps), "optimizer.step()")
        trial.criterion("passes", self._called(model.syncs(), steps), "sync_gradients(), with do_sync True,")
        trial.criterion("memory", self._passes.kept())
        self._steps_taken.clear()
        trial.cost(calls={"all_reduce": steps * len(model.trained())})
        trial.criterion("restored", difference(model.do_sync, True), "do_sync after the epoch")

    @staticmethod
    def _called(number: int, expected: int) -> str:
        return f"is called {times(number)}, should be {times(expected)}" if number != expected else ""

    def _train_at_once(self) -> None:
        """What one process does that has room for a whole window of all ranks."""
        for inputs, targets in zip(self._inputs.split(self._n), self.targets.split(self._n), strict=True):
            if not len(inputs):  # what an empty tensor is split into
                return
            self._plain.zero_grad()
            mse_loss(self._alone(inputs), targets).backward()
            self._plain.step()

    def examine_stopped(self) -> None:
        """An exception in the second window, and Stop: no further step, and the caller hears of it."""
        trial, found = self._trial, []

        def stopped(answer: Callable, *given: object) -> None:
            for place, raising in self._places.items():
                for error in (SomeError(), Stop()):
                    with raising(error):
                        complaint = _ending(lambda: answer(*given), error)
                    where = f"{type(error).__name__} in {place}"
                    found.append((where, complaint, len(self._steps_taken), self.model.do_sync))
                    self._steps_taken.clear()
                    self.model.enable_grad_sync()
                    self.model.zero_grad()

        self._call("an exception in the second window, n=4", using=stopped)
        for where, complaint, steps, flag in found:
            trial.criterion("value", complaint and f"{where}: {complaint}")
            trial.criterion("passes", self._called(steps, 1), f"after {where}, optimizer.step()")
            trial.criterion("restored", difference(flag, True), f"do_sync after {where}")

    @property
    def _places(self) -> dict[str, Callable[[BaseException], contextlib.AbstractContextManager]]:
        """Where an epoch of windows of 4 may end in the second one: block(error), in which error is raised there."""
        model, optimizer = self.model, self._optimizer

        def forward(error: BaseException) -> contextlib.AbstractContextManager:
            return _removed(model.module.register_forward_pre_hook(_raiser(error, 6)))

        def backward(error: BaseException) -> contextlib.AbstractContextManager:
            raising = _raiser(error, 6)

            def hook(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
                output.register_hook(raising)

            return _removed(model.module.register_forward_hook(hook))

        @contextlib.contextmanager
        def sync(error: BaseException) -> Iterator[None]:
            model.before_sync = _raiser(error, 2)
            yield
            model.before_sync = None

        def step(error: BaseException) -> contextlib.AbstractContextManager:
            return _removed(optimizer.register_step_pre_hook(_raiser(error, 2)))

        return {
            "the sixth forward": forward,
            "the sixth backward": backward,
            "the second sync": sync,
            "the second optimizer.step()": step,
        }


def _raiser(error: BaseException, number: int) -> Callable:
    """What raises `error` in its call of this number, and not if it is tried again."""
    calls = itertools.count(1)

    def hook(*_: object) -> None:
        if next(calls) == number:
            raise error

    return hook


@contextlib.contextmanager
def _removed(hook: RemovableHandle) -> Iterator[None]:
    """At the end of the block, this hook is removed."""
    yield
    hook.remove()


class _Passes:
    """The order of a model's forward and backward passes, as "FBFB…", and what is kept of them."""

    def __init__(self, model: _Counted):
        self._order, self._earlier = "", False
        self._activations: list[weakref.ref[torch.Tensor]] = []
        self._outputs: list[weakref.ref[torch.Tensor]] = []
        model.register_forward_pre_hook(self._begin)
        model.module[1].register_forward_hook(lambda _, args, output: self._activations.append(weakref.ref(output)))
        model.register_forward_hook(self._forward)

    def _begin(self, *_: object) -> None:
        """`output` may still be the name of the last one, but what was needed for backward is gone."""
        self._earlier |= any(each() is not None for each in (*self._activations, *self._outputs[:-1]))

    def _forward(self, _: nn.Module, args: tuple, output: torch.Tensor) -> None:
        self._order += "F"
        self._outputs.append(weakref.ref(output))
        output.register_hook(self._backward)

    def _backward(self, _: torch.Tensor) -> None:
        self._order += "B"

    def kept(self) -> str:
        """That a forward pass began while an earlier micro-batch's tensors were held, as a complaint. Begins anew."""
        earlier, self._earlier = self._earlier, False
        self._activations.clear()
        self._outputs.clear()
        return "a forward pass begins while outputs or activations of earlier micro-batches are kept" if earlier else ""

    def complaint(self, micro_batches: int) -> str:
        """That there are not as many pairs as micro-batches; "" if there are. Begins anew."""
        order, self._order = self._order, ""
        if order == "FB" * micro_batches:
            return ""
        if order.count("F") != micro_batches:
            return f"{order.count('F')} forward passes for {micro_batches} micro-batches, should be one each"
        return "a forward pass begins before the backward pass of the one before"


TRAIN_EPOCH = Exercise(
    train_epoch,
    examine_train_epoch,
    given="import contextlib\n\nfrom torch.nn.functional import mse_loss",
)
EXERCISES = (NO_SYNC, TRAIN_EPOCH)
