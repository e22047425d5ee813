"""Lesson 06, when ranks must talk: `no_sync` as a context manager."""

import builtins
import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.guard import GRADIENTS, Guard
from scratch_ddp.course.inputs.one_process import tried_in_worlds
from scratch_ddp.course.trial import Trial
from scratch_ddp.course.wording import difference
from scratch_ddp.minimal.ddp import DataParallel, SimpleDistributedDataParallelism


def no_sync(model):
    """Return a context manager: in its `with` block, `model.do_sync` is False.

    After the block it is what it was when the block began, however the block ends. Any exception
    reaches the caller, the KeyboardInterrupt of Stop too. Nothing else of the model changes, and
    nothing of another model: blocks of two models may end in any order. Use model.do_sync and
    model.disable_grad_sync().
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


class CountedModel(_Wrapped):
    """Counts the calls of sync_gradients() that average. Has a tied weight, a frozen bias, a part in eval mode.

    In float64. The first layer is a wrapped model, too. With other than three columns in its output, nothing is tied.
    """

    def __init__(self, device: torch.device, columns: int = 3):
        first, last = (nn.Linear(3, out, dtype=torch.float64, device=device) for out in (3, columns))
        if columns == 3:
            last.weight = first.weight
        first.bias.requires_grad_(False)
        with torch.no_grad():
            for parameter in (first.weight, first.bias, last.weight, last.bias):
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
    """What `except` with any of these classes would catch, or who looks for one of these words."""

    def __str__(self) -> str:
        return "CUDA out of memory, connection closed by peer, timeout"


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


def wrong_ending(run: Callable, error: BaseException) -> str:
    """What is wrong with the end of run(), in which `error` is raised; "" if it reaches the caller."""
    try:
        run()
    except type(error) as raised:
        return "" if raised is error else f"raised another {type(error).__name__} than the one in the block"
    except RuntimeError as raised:
        if raised.__cause__ is not error:  # what Python makes of a StopIteration that leaves a generator
            raise
        return ""
    return f"returned, should raise {type(error).__name__}"


def examine_no_sync(trial: Trial) -> None:
    """V and C inside the block; R after it: however it ends, whatever the flag was, in blocks of two models."""
    model = CountedModel(trial.device)
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

    def micro_batch(answer: Callable) -> tuple[list[bool], list[torch.Tensor | None]]:
        model.zero_grad()
        with answer(model):
            flags = [model.do_sync, other.do_sync]
            model(own).sum().backward()
            model.sync_gradients()
        return flags, copy.deepcopy([parameter.grad for parameter in trained])  # the next case changes them

    def sync_after(answer: Callable) -> None:
        with answer(model):
            pass
        model.enable_grad_sync()
        if all(parameter.grad is not None for parameter in trained):  # else that is the complaint
            model.sync_gradients()

    with_passes = {
        "a micro-batch": (micro_batch, True),
        "a micro-batch, switched off before": (micro_batch, False),
        "a sync after the block": (sync_after, True),
    }
    if not trial.on_all_ranks:  # the rest does not depend on the number of ranks
        with_passes = {"a micro-batch": with_passes["a micro-batch"]}
    called = trial.call_each(with_passes, using=flags_after, beside=[model], changes=["do_sync", GRADIENTS])
    for (lines, before), result in zip(with_passes.values(), called, strict=True):
        found = judge(result, before)
        trial.cost(calls={"all_reduce": len(trained) if lines is sync_after else 0}, exactly=True)
        if lines is micro_batch:
            flags, gradients = found
            trial.value(flags[:1], [False], "do_sync in the block")
            trial.value(flags[1:], [before], "in the block, the do_sync of another model, a part of this one")
            trial.value(gradients, mine, "the gradient")
    if not trial.on_all_ranks:
        return
    blocks = _Blocks(model, other)
    cases = {case: (lines, before) for case, (lines, before, *_) in blocks.cases.items()}
    flags = trial.call_each(cases, using=flags_after, beside=[model], changes=["do_sync"])
    for (_, before, expected, what), found in zip(blocks.cases.values(), flags, strict=True):
        inside = judge(found, before)
        if what:
            trial.criterion("restored", difference(inside, expected), what)
            continue
        if isinstance(inside, str):
            trial.criterion("restored", inside)
            continue
        for error, complaint, flag in inside or ():
            trial.criterion("value", complaint)
            trial.criterion("restored", difference(flag, before), f"do_sync after {error} in the block")
    trial.cost(calls={})
    trial.end_if_wrong()
    for _, world in tried_in_worlds(trial, {"a block": lambda: [(CountedModel(trial.device),)]}, using=_flag_inside):
        trial.value(world.results[0], False, f"{world.place} do_sync in the block")


def _flag_inside(answer: Callable, model: CountedModel) -> bool:
    with answer(model):
        return model.do_sync


_OF_NESTED = "do_sync after the first and the second inner block, and after the outer one"


class _Blocks:
    """Blocks in which nothing is sent. `cases`: lines(answer), do_sync before, what the lines should return, of what.

    Where it is not said of what, the lines return what is wrong: a complaint, or one for each exception.
    """

    def __init__(self, model: CountedModel, other: _Wrapped):
        self._model, self._other = model, other
        of_both = "do_sync of both, after the first block ended and after the second"
        self.cases = {
            "an exception in the block": (functools.partial(self._failing, True), True, None, ""),
            "an exception in the block, switched off before": (
                functools.partial(self._failing, False),
                False,
                None,
                "",
            ),
            "a block in a block": (
                functools.partial(self._nested, (None, True)),
                True,
                [False, True, True],
                _OF_NESTED,
            ),
            "a block in a block, switched on and then off in the outer one": (
                functools.partial(self._nested, (True, False)),
                True,
                [True, False, True],
                _OF_NESTED,
            ),
            "switched off between the call and the block": (self._switched_off_later, False, None, ""),
            "switched off before, switched on in the block": (self._switched_on_inside, False, None, ""),
            "blocks of two models, the second one's flag off before": (
                self._two_models,
                True,
                [[True, False], [True, False]],
                of_both,
            ),
            "nothing is frozen, and every parameter has a gradient": (self._nothing_frozen, True, None, ""),
            "beside do_sync, in the block": (self._compared_inside, True, "", ""),
            "what the caller changes in the block, after it": (
                self._changed_inside,
                True,
                "",
                "",
            ),
        }

    def _failing(self, before: bool, answer: Callable) -> list[tuple[str, str, bool]]:
        found = []
        for error in _exceptions():

            def run(error: BaseException = error) -> None:
                with answer(self._model):
                    raise error

            found.append((type(error).__name__, wrong_ending(run, error), self._model.do_sync))
            self._model.do_sync = before
        return found

    def _nested(self, flags: tuple[bool | None, bool], answer: Callable) -> list[bool]:
        """flags: what the caller sets do_sync to before each of the inner blocks, if anything."""
        found = []
        with answer(self._model):
            for flag in flags:
                if flag is not None:
                    self._model.do_sync = flag
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

    def _nothing_frozen(self, answer: Callable) -> str:
        model, frozen = self._model, [each for each in self._model.parameters() if not each.requires_grad]
        before = [each.grad for each in model.parameters()]
        for parameter in model.parameters():
            parameter.requires_grad_(True).grad = torch.ones_like(parameter)
        given = [parameter.grad for parameter in model.parameters()]
        with answer(model):
            pass
        kept = all(
            parameter.grad is gradient and bool((gradient == 1).all())
            for parameter, gradient in zip(model.parameters(), given, strict=True)
        )
        for parameter, gradient in zip(model.parameters(), before, strict=True):
            parameter.grad = gradient
        for parameter in frozen:
            parameter.requires_grad_(False)
        return "" if kept else "the gradients that the model had before the block are no longer there"

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

    def _compared_inside(self, answer: Callable) -> str:
        model = self._model
        guard = self._guard()
        guard.__enter__()
        with answer(model):
            guard.__exit__(None, None, None)
        return guard.complaint

    def _changed_inside(self, answer: Callable) -> str:
        """The caller changes a bit of everything in the block."""
        model = self._model
        weight, bias = model.module[2].weight, model.module[2].bias
        before = weight.detach().clone(), weight.grad, model.training
        guard = self._guard()
        with answer(model):
            model.training = False
            weight.data.mul_(2)
            weight.grad = torch.ones_like(weight)
            bias.requires_grad_(False)
            model.note = 1.0
            guard.__enter__()
        guard.__exit__(None, None, None)
        with torch.no_grad():
            weight.copy_(before[0])
        weight.grad, model.training = before[1:]
        bias.requires_grad_()
        vars(model).pop("note", None)
        return guard.complaint

    def _guard(self) -> Guard:
        return Guard(None, {"model": self._model}, ["do_sync"])


NO_SYNC = Exercise(
    no_sync,
    examine_no_sync,
    given="import contextlib",
)
EXERCISES = (NO_SYNC,)
