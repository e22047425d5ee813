"""A step's gradients on their way: messages that start while backward goes on, in one order on every rank.

Collectives are paired by their order, so every rank must start the same messages in the same order, whatever gradients
it has. That order is the list's: a message that is full waits until the one in front of it has started.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.agreement import message_device


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
