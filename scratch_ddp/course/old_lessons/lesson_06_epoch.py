"""Lesson 06, the second exercise: an epoch whose last window is shorter."""

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.hooks import RemovableHandle

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.guard import GRADIENTS, STATE, VALUES, Guard
from scratch_ddp.course.inputs.one_process import tried_in_worlds
from scratch_ddp.course.lessons.lesson_06 import CountedModel, SomeError, Stop, wrong_ending
from scratch_ddp.course.trial import Trial
from scratch_ddp.course.wording import called, difference
from scratch_ddp.instruments.traffic.intercept import LightMode


def train_epoch(model, optimizer, batches, n):
    """One epoch: a step after every n micro-batches, and one for those that remain at the end.

    Each step takes the gradient of the mean loss over all micro-batches of its window, on all
    ranks. `model` is a SimpleDistributedDataParallelism, whose sync_gradients() averages;
    `optimizer` has all the model's trainable parameters. `batches` is a list of (inputs, targets),
    perhaps empty, all of one size, as many on every rank; the loss is mse_loss. Each micro-batch has
    one forward and one backward of its own; no losses or outputs are collected. When the epoch
    begins, gradients are None or zero and do_sync is True; when it ends, too. Any exception reaches
    the caller, the KeyboardInterrupt of Stop too, with no step for its window and do_sync True.
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
        columns = 1 if 0 < micro_batches < n else 3
        items = 2 if n == 4 and micro_batches > n else (1 if columns > 1 else 6, 3, 4, 5)[trial.seed % 4]
        of_items = f" of {items} item{'s' if items > 1 else ''}" if items != 2 and micro_batches else ""
        case = f"{micro_batches} micro-batches{of_items}, n={n}{drawn}"
        case += ", one column" if columns == 1 else ""
        dtype = torch.float32 if micro_batches == 6 else torch.float64
        epoch = _Epoch(trial, micro_batches, n, items, columns, dtype)
        if n == 1:
            case += ", large targets, then gradients of 0"
            epoch.targets.mul_(1e4)
            epoch.silence(1)
        for each in range(epochs):
            epoch.examine(f"{case}{', second epoch' if each else ''}")
    if not trial.on_all_ranks:  # the rest does not depend on the number of ranks
        return
    epoch = _Epoch(trial, 2, 2)
    epoch.targets[:, 0, 0, 0] = torch.nan
    epoch.examine("2 micro-batches, n=2, a target of each is NaN on rank 0")
    trial.end_if_wrong()
    _examine_stopped(trial)


class _Epoch:
    """Micro-batches, a model and an optimizer for the answer, and the same for one process that has all of them."""

    changes = VALUES, GRADIENTS, STATE, "do_sync"

    def __init__(
        self,
        trial: Trial,
        micro_batches: int,
        n: int,
        items: int = 2,
        columns: int = 3,
        dtype: torch.dtype = torch.float64,
    ):
        self._trial, self._micro_batches, self._n = trial, micro_batches, n
        self._steps = -(-micro_batches // n)
        self._ends_as_it_began = micro_batches > n and n > 1  # so the last is known by its place alone
        generator = torch.Generator().manual_seed(trial.seed + micro_batches if n > 5 else micro_batches)
        drawn = torch.randn(micro_batches, trial.size, items, 3 + columns, generator=generator, dtype=torch.float64)
        if self._ends_as_it_began:
            drawn[-1] = drawn[0]
        self._inputs, self.targets = drawn.to(trial.device, dtype).split((3, columns), dim=-1)
        self._tolerance = 1e-12 if dtype is torch.float64 else 1e-5
        self.model, alone = (CountedModel(trial.device, columns).to(dtype) for _ in range(2))
        self._alone = alone.module
        self._optimizer, self._plain = (
            torch.optim.SGD([{"params": [each]} for each in model.trained()], lr=0.1, momentum=0.5)
            for model in (self.model, alone)
        )
        self._passes, self._steps_taken = _Passes(self.model), []
        self._optimizer.register_step_post_hook(lambda *_: self._steps_taken.append(1))

    def silence(self, micro_batch: int) -> None:
        """Let the gradients of a micro-batch be exactly 0: momentum moves the parameters in its step all the same."""
        self._inputs[micro_batch] = 0
        for module in (self.model.module, self._alone):
            module.register_forward_hook(lambda _, args, output: output * args[0].count_nonzero().sign())

    def _given(self) -> tuple[CountedModel, torch.optim.Optimizer, list, int]:
        mine = list(zip(self._inputs[:, self._trial.rank], self.targets[:, self._trial.rank], strict=True))
        if self._ends_as_it_began:
            mine[-1] = mine[0]
        return self.model, self._optimizer, mine, self._n

    def examine(self, case: str) -> None:
        """The answer's epoch, and what must hold after it."""
        trial, model, steps = self._trial, self.model, self._steps
        using = self._passes.watched if self._micro_batches == 8 else None
        trial.call(*self._given(), case=case, changes=self.changes, using=using)
        self._train_at_once()
        expected = dict(self._alone.named_parameters())
        for name, parameter in model.module.named_parameters():
            trial.value(parameter.detach(), expected[name].detach(), f"the parameter {name!r}", self._tolerance)
            left = parameter.grad is not None and bool(parameter.grad.count_nonzero())
            trial.criterion("value", "is not clear after the epoch" if left else "", f"the gradient of {name!r}")
        trial.agreement(list(model.module.parameters()))
        trial.criterion("passes", self._passes.complaint(self._micro_batches))
        trial.criterion("passes", called(len(self._steps_taken), steps), "optimizer.step()")
        trial.criterion("passes", called(model.syncs(), steps), "sync_gradients(), with do_sync True,")
        trial.criterion("memory", self._passes.kept())
        self._steps_taken.clear()
        trial.cost(calls={"all_reduce": steps * len(model.trained())})
        trial.criterion("restored", difference(model.do_sync, True), "do_sync after the epoch")

    def _train_at_once(self) -> None:
        """What one process does that has room for a whole window of all ranks."""
        for inputs, targets in zip(self._inputs.split(self._n), self.targets.split(self._n), strict=True):
            if not len(inputs):  # what an empty tensor is split into
                return
            self._plain.zero_grad()
            mse_loss(self._alone(inputs), targets).backward()
            self._plain.step()

    def stopped(self, answer: Callable, raising: Callable, error: BaseException, steps: int) -> dict[str, str]:
        """What is wrong with an epoch in which `error` is raised, by criterion: complaints without the place."""
        given = self._given()
        guard = Guard(None, dict(zip(("model", "optimizer", "batches"), given, strict=False)), self.changes)
        with guard, raising(error) as reached:
            complaint = wrong_ending(lambda: answer(*given), error)
        if reached == []:  # it has its own way to clear gradients
            complaint = ""
        taken, flag = len(self._steps_taken), self.model.do_sync
        self._steps_taken.clear()
        self.model.enable_grad_sync()
        self.model.zero_grad()
        return {
            "value": complaint,
            "passes": called(taken, steps) and f"optimizer.step() {called(taken, steps)}" if steps else "",
            "restored": difference(flag, True) and f"do_sync {difference(flag, True)}",
            "untouched": guard.complaint,
        }

    @property
    def places(self) -> dict[str, tuple[Callable, tuple[BaseException, ...], int]]:
        """Where an epoch of windows of 4 may end in the second one: block(error), in which error is raised there.

        With the errors to be raised, and how many steps there are then (0: that is not asked).
        """
        model, optimizer = self.model, self._optimizer
        all_kinds = SomeError(), Stop(), StopIteration()

        def forward(number: int, error: BaseException) -> contextlib.AbstractContextManager:
            return _removed(model.module.register_forward_pre_hook(_raiser(error, number)))

        def backward(number: int, error: BaseException) -> contextlib.AbstractContextManager:
            raising = _raiser(error, number)

            def hook(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
                if output.requires_grad:
                    output.register_hook(raising)

            return _removed(model.module.register_forward_hook(hook))

        @contextlib.contextmanager
        def sync(error: BaseException) -> Iterator[None]:
            model.before_sync = _raiser(error, 2)
            yield
            model.before_sync = None

        def step(error: BaseException) -> contextlib.AbstractContextManager:
            return _removed(optimizer.register_step_pre_hook(_raiser(error, 2)))

        @contextlib.contextmanager
        def clear(error: BaseException) -> Iterator[list[int]]:
            reached: list[int] = []

            def zero_grad(*_: object, **__: object) -> None:
                reached.append(1)
                raise error

            with mock.patch.object(optimizer, "zero_grad", zero_grad), mock.patch.object(model, "zero_grad", zero_grad):
                yield reached

        places = {
            "the sixth forward": (functools.partial(forward, 6), all_kinds, 1),
            "the sixth backward": (functools.partial(backward, 6), all_kinds, 1),
            "the second sync": (sync, all_kinds, 1),
            "the second optimizer.step()": (step, all_kinds, 1),
        }
        for number, name in ((5, "fifth"), (8, "eighth")):  # the first and the last of the window
            places[f"the {name} forward"] = functools.partial(forward, number), (SomeError(),), 1
            places[f"the {name} backward"] = functools.partial(backward, number), (SomeError(),), 1
        places["zero_grad()"] = clear, (SomeError(),), 0  # last: the first two are tried once more, see tried_in_worlds
        return places


def _examine_stopped(trial: Trial) -> None:
    """An exception in the second window, and Stop: no further step, and the caller hears of it. With one rank."""
    epoch, makers = _Epoch(trial, 8, 4), {}
    for place, (raising, errors, steps) in epoch.places.items():
        for error in errors:
            case = f"n=4, after {type(error).__name__} in {place}"
            makers[case] = functools.partial(_as_arguments, epoch, raising, error, steps)
    for _, world in tried_in_worlds(trial, makers, using=_stopped):
        for criterion, complaint in world.results[0].items():
            trial.criterion(criterion, complaint, world.place)


def _as_arguments(*given: object) -> list[tuple]:
    return [given]


def _stopped(answer: Callable, epoch: _Epoch, *how: Any) -> dict[str, str]:
    return epoch.stopped(answer, *how)


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


class _Made(LightMode):
    """The memory of the tensors that operations make in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.watches, self._thread = False, threading.get_ident()

    def __enter__(self) -> "_Made":
        self.watches = True
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        self.watches = False
        super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if threading.get_ident() == self._thread:
            for each in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(each, torch.Tensor):
                    self.storages.add(each.untyped_storage())
        return result


class _Passes:
    """The order of a model's forward and backward passes, as "FBFB…", and what is kept of them."""

    def __init__(self, model: CountedModel):
        self._order, self._earlier = "", False
        self._model, self._made, self._counts, self._n = model, _Made(), [], 1
        self._activations: list[weakref.ref[torch.Tensor]] = []
        self._outputs: list[weakref.ref[torch.Tensor]] = []
        model.register_forward_pre_hook(self._begin)
        model.module[1].register_forward_hook(lambda _, args, output: self._activations.append(weakref.ref(output)))
        model.register_forward_hook(self._forward)

    def watched(self, answer: Callable, model: CountedModel, optimizer: torch.optim.Optimizer, *given: object) -> None:
        self._optimizer, self._n = optimizer, given[-1]
        with self._made:
            answer(model, optimizer, *given)

    def _own(self) -> set[torch.UntypedStorage]:
        """What stays from one micro-batch to the next: gradients, and the optimizer's state."""
        gradients = [each.grad for each in self._model.parameters()]
        states = [each for state in self._optimizer.state.values() for each in state.values()]
        return {each.untyped_storage() for each in (*gradients, *states) if isinstance(each, torch.Tensor)}

    def _begin(self, *_: object) -> None:
        """`output` may still be the name of the last one, but what was needed for backward is gone."""
        self._order += "F"  # here, since checkpointing does not always end a forward that it runs again
        self._earlier |= any(each() is not None for each in (*self._activations, *self._outputs[:-1]))
        if self._made.watches:
            self._counts.append(len(self._made.storages - self._own()))

    def _forward(self, _: nn.Module, args: tuple, output: torch.Tensor) -> None:
        self._outputs.append(weakref.ref(output))
        if output.requires_grad:  # not in a pass under no_grad()
            output.register_hook(self._backward)

    def _backward(self, _: torch.Tensor) -> None:
        self._order += "B"

    def kept(self) -> str:
        """That a forward pass began while an earlier micro-batch's tensors were held, as a complaint. Begins anew."""
        earlier, self._earlier = self._earlier, False
        counts, self._counts = self._counts, []
        windows = [counts[i + 1 : i + self._n] for i in range(0, len(counts), self._n)]  # the first has nothing before
        more = [window[-1] - window[0] >= len(window) - 1 > 1 for window in windows if window]
        self._made.storages.clear()
        self._activations.clear()
        self._outputs.clear()
        if any(more) and not earlier:
            return "a forward pass begins while a tensor of each earlier micro-batch is kept, its loss for instance"
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
EXERCISES = (TRAIN_EPOCH,)
