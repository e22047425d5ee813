"""Gradients that travel while backward still runs: what the strategies that work from gradient hooks share.

A strategy says which gradients travel together, as a list of messages. A hook on each parameter tells when its gradient
is there; a message starts when its last gradient is. `sync_gradients` starts what has not started, and waits.

Collectives are paired by their order, so every rank must start the same messages in the same order, whatever gradients
it has. That order is the list's: a message that is full waits until the one in front of it has started.
"""

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from scratch_ddp.agreement import message_device
from scratch_ddp.ddp.base import ReplicatedModule, hooked_modules
from scratch_ddp.ddp.gradients import complete_gradient

LATE = 2  # where a gradient is at `sync_gradients`: 0 nowhere, 1 in its message, 2 still in `.grad`, no message took it

INTERRUPTED = "backward did not reach its end, so not all gradients are complete: repeat the step"
FORGOTTEN = (
    "sync_gradients() was not called after the last backward, whose gradients are dropped now: call it after each "
    "backward, or run those that need no synchronisation inside no_sync()"
)
RENEWED = "the process group was renewed while gradients were on their way: repeat the step"


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
        self._start_anew()
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
        if self._under_way and torch.is_grad_enabled() and torch._C._current_graph_task_id() < 0:
            self._settle_the_last_step()  # outside of a backward, in which checkpointing calls it too
        return super().forward(*args, **kwargs)

    def gradient_arrived(self, number: int, parameter: nn.Parameter) -> None:
        """Put a gradient that autograd has just completed into message `number`; start the messages that are full."""
        if not self.do_sync:
            return
        self._note_backward()
        if number < len(self._works) or parameter in self._arrived or self._as_wrapped[parameter].refusal():
            return  # a second gradient, or one that can't be averaged: `sync_gradients` sees to it
        self._put(self.messages[number], parameter)
        self._missing[number] -= 1
        while len(self._works) < len(self.messages) and not self._missing[len(self._works)]:
            self._start_next()

    def sync_gradients(self) -> None:
        """Wait until each gradient is its mean over the ranks. Call it after every backward outside `no_sync`."""
        if not self.do_sync and not self._under_way:
            return
        problem = RENEWED if self._forget_if_renewed() else self._problem()
        try:
            where = self._complete(problem)
            for work in self._works:
                work.wait()
            self._hand_out(where)
        except BaseException:
            self._start_anew()
            raise
        self._begin_round()

    def remove_hooks(self) -> None:
        """Take the hooks off the model's parameters; `sync_gradients()` goes on averaging, after backward."""
        super().remove_hooks()
        hooked_modules.discard(self)
        if self._under_way:
            self._start_anew()

    def _put(self, message: Message, parameter: nn.Parameter) -> None:
        message.put(parameter, self.world_size)
        parameter.grad = None  # or a second backward would add to what is under way
        self._arrived.add(parameter)

    def _start_next(self, problem: str | None = None) -> None:
        """Start the next message with the gradients that are there. A rank with a problem sends zeros: others wait."""
        message = self.messages[len(self._works)]
        for parameter in message.parameters:
            if parameter not in self._arrived:
                if parameter.requires_grad and parameter.grad is not None and problem is None:
                    self._put(message, parameter)
                else:
                    message.put_zeros(parameter)
        self._works.append(dist.all_reduce(message.tensor, group=self.group, async_op=True))

    def _complete(self, problem: str | None, given_up: bool = False) -> list[int]:
        """Start all messages that have not started; return where gradients are on any rank, see `LATE`."""
        while len(self._works) < len(self.messages):
            self._start_next(problem)
        return self.agree_on(self._where(), problem, given_up)  # while messages are on their way

    def _where(self) -> list[int]:
        """Say where the gradient of each of the model's parameters is, see `LATE`."""
        parameters = [parameter for _, parameter, *_ in self._wrapped]
        late = [parameter.requires_grad and parameter.grad is not None for parameter in parameters]
        return [LATE if is_late else each in self._arrived for each, is_late in zip(parameters, late, strict=True)]

    def _hand_out(self, where: list[int]) -> None:
        """Give each parameter its mean; what is late on any rank travels now, a parameter at a time, and is added."""
        means = {parameter: message for message in self.messages for parameter in message.parameters}
        for (_, parameter, *_), anywhere in zip(self._wrapped, where, strict=True):
            late = None
            if anywhere == LATE:
                late = complete_gradient(parameter)
                late /= self.world_size
                if late.numel():
                    dist.all_reduce(late, group=self.group)
            if anywhere and parameter in means:
                parameter.grad = means[parameter].mean(parameter)
                if late is not None:
                    parameter.grad += late

    def _note_backward(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)  # not if it raises
        if not self._under_way:
            self._carrier = _carrier(self.group)
            self._missing = [sum(each.requires_grad for each in message.parameters) for message in self.messages]

    def _backward_ended(self) -> None:
        self._in_backward = False

    @property
    def _under_way(self) -> bool:
        return bool(self._arrived or self._works)

    def _problem(self) -> str | None:
        if self._in_backward:
            return INTERRUPTED
        return super()._problem() or next(filter(None, (each.moved() for each in self._wrapped)), None)

    def _settle_the_last_step(self) -> None:
        """End a step that was not synchronised, in step with ranks that do synchronise it: they hear of it as well."""
        try:
            if not self._forget_if_renewed():
                interrupted = self._in_backward
                self._complete(INTERRUPTED if interrupted else FORGOTTEN, given_up=interrupted)
        finally:
            self._start_anew()

    def _forget_if_renewed(self) -> bool:
        """Forget a step whose messages were started before the group was renewed: they will not arrive."""
        renewed = self._under_way and self._carrier is not _carrier(self.group)
        if renewed:
            self._start_anew()
        return renewed

    def _start_anew(self) -> None:
        """Begin a round with new messages: what an abandoned collective may still write to is not used again."""
        self.messages = self.make_messages(self._trained[::-1])
        self._begin_round()

    def _begin_round(self) -> None:
        self._works: list[dist.Work] = []  # of the messages that have started, in their order
        self._arrived: set[nn.Parameter] = set()  # parameters whose gradient is in its message
        self._missing: list[int] = []  # gradients that a message still waits for
        self._in_backward = False
        self._carrier: object = None  # what carries them


def _carrier(group: dist.ProcessGroup | None) -> object:
    """What does a group's work. Rank cells put another in its place when they renew the group after a Stop."""
    with contextlib.suppress(RuntimeError):  # a group without any
        return (group or dist.group.WORLD)._get_backend(message_device(group))


def _calls_while_alive(wrapper: HookedModule, number: int) -> Callable[[nn.Parameter], None]:
    """The hook of a parameter in message `number`. A wrapper that nobody uses any more is not kept, nor called."""
    reference = weakref.ref(wrapper)

    def hook(parameter: nn.Parameter) -> None:
        if (alive := reference()) is not None:
            alive.gradient_arrived(number, parameter)

    return hook
