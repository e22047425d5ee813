"""Averaging from gradient hooks: what strategies share whose gradients travel while backward goes on.

A strategy says which gradients travel together, as a list of messages. A hook on each parameter tells when its gradient
is there. `sync_gradients` starts what has not started, waits, and hands out the means.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from scratch_ddp.common.agreement import message_device
from scratch_ddp.common.replicas import complete_gradient
from scratch_ddp.ddp.base import ReplicatedModule, hooked_modules

# FOLDED: A step's gradients on their way: messages that start while backward goes on, in one order on every rank.
#
# Collectives are paired by their order, so every rank must start the same messages in the same order, whatever gradients
# it has. That order is the list's: a message that is full waits until the one in front of it has started.


class Message(Protocol):
    """Gradients that one all-reduce of `tensor` sums over the ranks."""

    parameters: Sequence[nn.Parameter]
    tensor: torch.Tensor

    def put(self, parameter: nn.Parameter, world_size: int) -> None:
        """Take `parameter.grad`, divided by the number of ranks before the sum, which could overflow."""

    def put_zeros(self, parameter: nn.Parameter) -> None:
        """Take zeros in the place of a gradient that is not there."""

    def mean(self, parameter: nn.Parameter) -> torch.Tensor:
        """Hand out the parameter's part of the summed `tensor`."""


class Step:
    """Which gradients are in their messages, and which messages have started. One all-reduce a message."""

    def __init__(self, messages: Sequence[Message], group: dist.ProcessGroup | None):
        self.messages, self.group = messages, group
        self.world_size = dist.get_world_size(group)
        self.arrived: set[nn.Parameter] = set()  # their gradients are in their messages
        self.missing = [sum(each.requires_grad for each in message.parameters) for message in messages]
        self.works: list[dist.Work] = []  # of the messages that have started
        self.in_backward = False  # set while gradients arrive; an interrupted backward leaves it set
        self._carrier = _carrier(group)

    def take(self, number: int, parameter: nn.Parameter) -> None:
        """Put a gradient that has arrived into message `number`; start the messages that are full, in their order."""
        if number < len(self.works) or parameter in self.arrived:
            return  # a second gradient stays in `.grad`, and is late
        self._put(self.messages[number], parameter)
        self.missing[number] -= 1
        while len(self.works) < len(self.messages) and not self.missing[len(self.works)]:
            self._start_next()

    def start_rest(self, empty: bool = False) -> None:
        """Start what has not started, with the gradients that are there. A rank that can't go on sends them `empty`."""
        while len(self.works) < len(self.messages):
            self._start_next(empty)

    def wait(self) -> None:
        """Wait until all messages that have started are through."""
        for work in self.works:
            work.wait()

    def backward_ended(self) -> None:
        """Note that all gradients of the backward that was under way have arrived."""
        self.in_backward = False

    def was_cut_off(self) -> bool:
        """Whether the group has been renewed since the step began, as after a Stop: then messages never arrive."""
        return self._carrier is not _carrier(self.group)

    def _put(self, message: Message, parameter: nn.Parameter) -> None:
        message.put(parameter, self.world_size)
        parameter.grad = None  # or a second backward would add to what is on its way
        self.arrived.add(parameter)

    def _start_next(self, empty: bool = False) -> None:
        message = self.messages[len(self.works)]
        self._fill(message, empty)
        self.works.append(dist.all_reduce(message.tensor, group=self.group, async_op=True))

    def _fill(self, message: Message, empty: bool) -> None:
        """Put what has not arrived: gradients that were there before this backward, and zeros."""
        for parameter in message.parameters:
            if parameter not in self.arrived:
                if parameter.requires_grad and parameter.grad is not None and not empty:
                    self._put(message, parameter)
                else:
                    message.put_zeros(parameter)


def _carrier(group: dist.ProcessGroup | None) -> object:
    """What does a group's work. Rank cells put another in its place when they renew the group."""
    try:
        return (group or dist.group.WORLD)._get_backend(message_device(group))
    except RuntimeError:  # a group without a backend, as a lone rank has: it is never renewed
        return None


INTERRUPTED = "backward did not reach its end, so not all gradients are complete: repeat the step"
FORGOTTEN = (
    "sync_gradients() was not called after the last backward, whose gradients are dropped now: call it after each "
    "backward, or run those that need no synchronisation inside no_sync()"
)
CUT_OFF = "the process group was renewed while gradients were on their way: repeat the step"
LATE = 2  # where a gradient is at `sync_gradients`: 0 nowhere, 1 in its message, 2 still in `.grad`, no message took it


class HookedModule(ReplicatedModule):
    """A replicated model whose gradients travel from gradient hooks. The base of strategies, not one itself.

    Whether a gradient is synchronised is read when it arrives. From then on until `sync_gradients()` it belongs to its
    message, and `.grad` is None. A gradient that has not arrived by then (this rank does not use the parameter, or did
    so inside `no_sync` only) and one that arrives twice are served by `sync_gradients()`: the result is right, only
    less is hidden behind backward. So it is when modules were not registered in the order in which they run.

    A step that was begun and not synchronised is settled by the next `forward`: it raises ValueError on every rank, but
    forgets the step where backward was interrupted on all, or a Stop has renewed the group. A rank that leaves out a
    whole step is paired with the others' next one: then one rank waits at the end, which the rank cell or the process
    group's timeout reports. Collectives of the model's own backward (SyncBatchNorm's) need a group of their own where
    ranks use different parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        settings: str = "",
        problem: str | None = None,
    ):
        super().__init__(model, group, settings=settings, problem=problem)
        self.copy_from_first()
        self._trained = [each for each in model.parameters() if each.requires_grad and each.numel()]
        self._as_wrapped = {each.parameter: each for each in self._wrapped}
        self._forget()
        for number, message in enumerate(self.messages):
            for parameter in message.parameters:
                hook = _calls_while_alive(self, number)
                self.hook_handles.append(parameter.register_post_accumulate_grad_hook(hook))
        hooked_modules.add(self)

    def make_messages(self, parameters: list[nn.Parameter]) -> list[Message]:
        """Share parameters, given in the order in which backward reaches them, among messages."""
        raise NotImplementedError(f"{type(self).__name__} does not say which gradients travel together")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped model. No communication, unless the step before was not synchronised."""
        if self._step and torch.is_grad_enabled() and torch._C._current_graph_task_id() < 0:
            self._settle_the_last_step()  # outside of a backward, in which checkpointing calls it too
        return super().forward(*args, **kwargs)

    def gradient_arrived(self, number: int, parameter: nn.Parameter) -> None:
        """Send a gradient that autograd has just completed with message `number`. What can't be averaged stays."""
        if self.do_sync:
            step = self._step_in_backward()
            if self._as_wrapped[parameter].refusal() is None:
                step.take(number, parameter)

    def sync_gradients(self) -> None:
        """Wait until each gradient is its mean over the ranks. Call it after every backward outside `no_sync`."""
        if not self.do_sync and not self._step:
            return
        problem = CUT_OFF if self._forget_if_cut_off() else self._problem()
        with self._step_to_its_end() as step:
            step.start_rest(empty=problem is not None)
            where = self.agree_on(self._where(step), problem)  # while messages are on their way
            step.wait()
            self._hand_out(where)

    def remove_hooks(self) -> None:
        """Take the hooks off the model's parameters; `sync_gradients()` goes on averaging, after backward."""
        super().remove_hooks()
        hooked_modules.discard(self)
        if self._step:
            self._forget()

    def _step_in_backward(self) -> Step:
        """The step that the backward belongs to which runs now; a new one unless one was begun."""
        self._step = self._step or Step(self.messages, self.group)
        if not self._step.in_backward:
            self._step.in_backward = True  # until autograd says at the end, not having raised, that it is no longer so
            torch.autograd.Variable._execution_engine.queue_callback(self._step.backward_ended)
        return self._step

    @contextlib.contextmanager
    def _step_to_its_end(self) -> Iterator[Step]:
        """The step that was begun, or a new one; over after the block, and given up where that fails."""
        try:
            self._step = self._step or Step(self.messages, self.group)
            yield self._step
            self._step = None
        except BaseException:  # a Stop too
            self._forget()
            raise

    def _where(self, step: Step) -> list[int]:
        """Say where the gradient of each of the model's parameters is, see `LATE`."""
        parameters = [parameter for _, parameter, *_ in self._wrapped]
        late = [parameter.requires_grad and parameter.grad is not None for parameter in parameters]
        return [LATE if is_late else each in step.arrived for each, is_late in zip(parameters, late, strict=True)]

    def _hand_out(self, where: list[int]) -> None:
        """Give each parameter its mean; what is late on any rank travels now, a parameter at a time, and is added."""
        messages = {parameter: message for message in self.messages for parameter in message.parameters}
        for (_, parameter, *_), anywhere in zip(self._wrapped, where, strict=True):
            late = None
            if anywhere == LATE:
                late = complete_gradient(parameter)
                late /= self.world_size
                if late.numel():
                    dist.all_reduce(late, group=self.group)
            if anywhere and parameter in messages:
                parameter.grad = messages[parameter].mean(parameter)
                if late is not None:
                    parameter.grad += late

    def _problem(self) -> str | None:
        if self._step and self._step.in_backward:
            return INTERRUPTED
        return super()._problem() or next(filter(None, (each.moved() for each in self._wrapped)), None)

    def _settle_the_last_step(self) -> None:
        """End a step that was not synchronised, in step with ranks that do synchronise it: they hear of it as well."""
        try:
            if not self._forget_if_cut_off():
                interrupted = self._step.in_backward
                self._step.start_rest(empty=True)
                problem = INTERRUPTED if interrupted else FORGOTTEN
                self.agree_on([0] * len(self._wrapped), problem, given_up=interrupted)
        finally:
            self._forget()

    def _forget_if_cut_off(self) -> bool:
        """Forget a step whose messages will not arrive, as the group has been renewed; say whether it was so."""
        cut_off = self._step is not None and self._step.was_cut_off()
        if cut_off:
            self._forget()
        return cut_off

    def _forget(self) -> None:
        """Go on with new messages: those that were given up may still be written to."""
        self.messages = self.make_messages(self._trained[::-1])
        self._step: Step | None = None  # from the first gradient of a step to its `sync_gradients()`


def _calls_while_alive(wrapper: HookedModule, number: int) -> Callable[[nn.Parameter], None]:
    """The hook of a parameter in message `number`. A wrapper that nobody uses any more is not kept, nor called."""
    reference = weakref.ref(wrapper)

    def hook(parameter: nn.Parameter) -> None:
        if (alive := reference()) is not None:
            alive.gradient_arrived(number, parameter)

    return hook
