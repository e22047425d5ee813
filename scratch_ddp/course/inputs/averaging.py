"""What the exercises of lessons 08 and 09 share: a model, the means of its gradients, a step that is observed."""

import contextlib
import copy
import functools
import gc
import itertools
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.course.trial import Trial
from scratch_ddp.instruments.traffic.calls import Call
from scratch_ddp.instruments.traffic.intercept import listening, with_subclasses, works_under_way


def three_layers(trial: Trial, times: int = 1) -> nn.Module:
    """Three layers with equal values on all ranks, `times` as wide; no two of the six gradients are equal."""
    widths = (48, 32 * times, 16 * times, 4)
    model = nn.Sequential(*(nn.Linear(*ends) for ends in itertools.pairwise(widths))).double().to(trial.device)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 0.5)
    return model


def everyones_inputs(trial: Trial, step: int) -> list[torch.Tensor]:
    """Every rank's inputs, different on each rank and in each step; in step 1 the last rank's are 0.

    So is the gradient of its first weight, which counts as any other.
    """
    generator = torch.Generator().manual_seed(100 + step)
    inputs = torch.rand(trial.size, 1, 48, generator=generator, dtype=torch.float64)
    if step == 1:
        inputs[-1] = 0
    return list(inputs.to(trial.device))


def examine_means(trial: Trial, model: nn.Module, batches: list[list[torch.Tensor]]) -> None:
    """V and A: `.grad` is what one process computes from all ranks' inputs, with a copy that has no hooks."""
    alone = copy.deepcopy(model)
    parameters, theirs = ([each for each in of.parameters() if each.requires_grad] for of in (model, alone))
    loss = sum(alone(each).sum() for inputs in batches for each in inputs) / trial.size
    for i, (parameter, mean) in enumerate(zip(parameters, torch.autograd.grad(loss, theirs), strict=True)):
        tolerance = max(1e-12, 8 * torch.finfo(mean.dtype).eps)
        trial.value(parameter.grad, mean, f"the gradient of parameter {i}", tolerance)
    trial.agreement([parameter.grad for parameter in parameters])


class OddParameters(nn.Module):
    """Parameters of odd shapes, eight for each dtype. Their gradients are numbers of the input, from 0 to 1, or all 0.

    order: in which backward reaches them. huge: the gradients are so large that the sum over two ranks overflows.
    """

    SHAPES = ((), (0,), (3,), (5, 4), (2, 3, 4), (0, 4), (1, 1), (7,))

    def __init__(self, trial: Trial, *dtypes: torch.dtype):
        super().__init__()
        tensors = [torch.ones(shape, dtype=dtype) for dtype in dtypes for shape in self.SHAPES]
        tensors = [tensor.mT.contiguous().mT if tensor.dim() == 2 else tensor for tensor in tensors]  # transposed
        self.odd = nn.ParameterList(tensors).to(trial.device)
        self.order, self.huge = list(range(len(tensors))), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(self._term(self.odd[i], x.flatten().roll(i)) for i in reversed(self.order))

    def _term(self, parameter: nn.Parameter, x: torch.Tensor) -> torch.Tensor:
        values = x[: parameter.numel()].view(parameter.shape)
        if parameter.shape == (3,):
            values = torch.zeros_like(values)
        if self.huge:
            values = values * (0.9 * torch.finfo(parameter.dtype).max)
        return (parameter * values.to(parameter.dtype)).sum().double()


def with_nan_and_infinities(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """In the inputs of the first rank and of the last."""
    inputs[0][0, 2], inputs[0][0, 5], inputs[-1][0, 9] = math.nan, math.inf, -math.inf
    return inputs


class ObservedStep:
    """Counts the messages that a step starts and waits for, in all and before backward returned.

    `buckets`: the parameters of each message. `in_order`: a message is to be started once its gradients and those of
    all messages before it are complete; otherwise once its own are.
    """

    def __init__(self, buckets: Sequence[Sequence[nn.Parameter]], in_order: bool = False):
        self.buckets, self.in_order = buckets, in_order
        self.calls, self.waits = 0, 0
        self.in_backward = 0, 0
        self.late = False  # a message could have been started earlier
        self.asked = ""  # by what somebody asked in backward whether a message has ended
        self.handles: list[weakref.ref[dist.Work]] = []  # of the messages that were under way when backward returned
        self._calls: set[Call] = set()
        self._arrived: set[nn.Parameter] = set()

    def run(self, loss: Callable[[], torch.Tensor], finish: Callable[[], None]) -> None:
        """Backward, then `finish()`."""
        parameters = [parameter for bucket in self.buckets for parameter in bucket]
        nodes = [_where_gradients_arrive(each) for each in parameters]
        hooks = [
            node.register_hook(functools.partial(self._gradient_arrived, parameter))
            for node, parameter in zip(nodes, parameters, strict=True)
        ]
        try:
            with listening(self):
                with _questions_noticed() as questions:
                    _backward(loss())
                self.asked = next(iter(questions), "")
                self.in_backward = self.calls, self.waits
                self.handles = [weakref.ref(work) for work, call in works_under_way().items() if call in self._calls]
                finish()
        finally:
            for hook in hooks:
                hook.remove()

    def started(self, call: Call) -> None:
        self.calls += 1
        self._calls.add(call)

    def waited(self, call: Call) -> None:
        self.waits += 1

    def _gradient_arrived(self, parameter: nn.Parameter, *_: Any) -> None:
        """Called by autograd after the answer's own hook, be it on the parameter or on its node."""
        self._arrived.add(parameter)
        complete = [self._arrived.issuperset(bucket) for bucket in self.buckets]
        self.late |= self.calls < sum(itertools.takewhile(bool, complete) if self.in_order else complete)

    def exposed(self) -> str:
        """What kept messages from hiding behind backward, as a complaint; "" if nothing did."""
        calls, waits = self.in_backward
        expected = len(self.buckets)
        if waits:
            return f"when backward returned, {waits} of {expected} messages had been waited for, should be 0"
        if self.asked:
            return f"asks {self.asked}() before backward has returned: nobody may wait for a message, in a loop either"
        if calls < expected:
            return f"when backward returned, {calls} of {expected} messages were started"
        what = "all gradients of a bucket were" if any(len(bucket) > 1 for bucket in self.buckets) else "a gradient was"
        return f"{what} complete, and the all-reduce was started only later" if self.late else ""

    def kept(self) -> str:
        """Which handles are still there, as a complaint; to be asked some time later."""
        if any(handle() is not None for handle in self.handles):
            gc.collect()
        kept = sum(handle() is not None for handle in self.handles)
        what = "handles are" if kept > 1 else "handle is"
        return f"{kept} {what} still kept: let go of {'them' if kept > 1 else 'it'} in finish()" if kept else ""


def _where_gradients_arrive(parameter: nn.Parameter) -> torch.autograd.graph.Node:
    """The node of autograd's graph that adds up `.grad`. Its hooks come after all those of the parameter."""
    with torch.enable_grad():
        return parameter.view_as(parameter).grad_fn.next_functions[0][0]


def _backward(loss: torch.Tensor) -> None:
    """As loss.backward(), which is itself a function to function modes: in its hooks none would be active."""
    ends = {"allow_unreachable": True, "accumulate_grad": True}
    torch.autograd.graph._engine_run_backward((loss,), (torch.ones_like(loss),), False, False, (), **ends)


_QUESTIONS = ("is_completed", "is_success", "exception", "synchronize")  # of a work


@contextlib.contextmanager
def _questions_noticed() -> Iterator[list[str]]:
    """Yields a list with the name of each question to a work or its future in the block, but for the package's own."""
    questions: list[str] = []
    replaced = [(cls, name) for cls in with_subclasses(dist.Work) for name in _QUESTIONS if name in vars(cls)]
    replaced = [(cls, name, vars(cls)[name]) for cls, name in [*replaced, (torch.futures.Future, "done")]]

    def noticed(name: str, original: Any) -> Callable:
        def question(thing: Any, *args: Any) -> Any:
            asks = sys._getframe(1).f_globals.get("__name__", "")
            if not asks.startswith("scratch_ddp."):
                questions.append(name)
            return original.__get__(thing, type(thing))(*args)

        return question

    for cls, name, original in replaced:
        setattr(cls, name, noticed(name, original))
    try:
        yield questions
    finally:
        for cls, name, original in replaced:
            setattr(cls, name, original)
