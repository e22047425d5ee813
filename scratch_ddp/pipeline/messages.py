"""What travels between stages in one pass. The schedule tells every rank who sends what to whom, so nobody asks."""

import contextlib

import torch
import torch.distributed as dist

from scratch_ddp.common.accounting import set_up
from scratch_ddp.pipeline.schedules import Action, Schedule
from scratch_ddp.pipeline.simulate import Message, gives, homes, needs

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MOST_DIMENSIONS = 8
_FAILED = -1  # in a header, in place of a dtype
_AHEAD = 2  # how many actions before its turn a message's receive is posted; gloo sends from then on


# Shape and dtype of a stage's output for a micro-batch, which its gradient has too: a tensor on the meta device.
Sizes = dict[tuple[int, int], torch.Tensor]


class Messages:
    """This rank's messages of one pass, through main memory. If `sizes` is empty, headers fill it.

    An output is kept until its gradient arrives, or else until the end of the pass, as gradients are. `lost`: a message
    will not come, because its sender has failed.
    """

    def __init__(self, schedule: Schedule, sizes: Sizes, group: dist.ProcessGroup | None, device: torch.device):
        self.rank, self.home, self.last = dist.get_rank(group), homes(schedule), max(homes(schedule))
        self.sizes, self.announced, self.group, self.device = sizes, not sizes, group, device
        self.row, self.lost = list(schedule[self.rank]), False  # what is still to do
        self.here: dict[Message, torch.Tensor | None] = {}  # from one stage of this rank to another
        self.coming: dict[Message, tuple[torch.Tensor, dist.Work]] = {}
        self.going: dict[Message, list[dist.Work]] = {}

    def take(self, action: Action) -> torch.Tensor | None:
        """Return what the next action needs from another stage; None if that is nothing, or `lost`."""
        for soon in self.row[: 1 + _AHEAD]:
            self._receive(self._needed(soon))
        self.row.pop(0)
        message = self._needed(action)
        if message is None:
            return None
        if message not in self.here:
            if self.announced and message.what == "x":
                self._hear_size(message)
            self._receive(message)
        tensor = self.here.pop(message) if message in self.here else self._arrived(message)
        self.lost |= tensor is None
        return tensor

    def give(self, action: Action, tensor: torch.Tensor | None) -> None:
        """Send what the action has computed to the stage that needs it; None if it could not be computed."""
        message = gives(action)
        if message is None or (to := self.home.get(message.stage + (1 if message.what == "x" else -1))) is None:
            return
        if to == self.rank:  # the next stage may change what it gets
            self.here[message] = tensor.clone() if tensor is not None and message.what == "x" else tensor
            return
        if self.announced and message.what == "x":
            self._send(_header(tensor), to, message, is_header=True)
        elif tensor is None and (size := self.sizes.get(_output(message))) is not None:
            tensor = torch.zeros(size.shape, dtype=size.dtype)  # the receiver waits for it
        if tensor is not None:
            self._send(tensor.contiguous().cpu(), to, message)

    def finish(self) -> None:
        """Return when everything has been received."""
        for message in list(self.going):
            self._wait(message)

    def _needed(self, action: Action) -> Message | None:
        return next((each for each in needs(action, self.last) if each.stage != action.stage), None)

    def _wait(self, message: Message) -> None:
        for work in self.going.pop(message, ()):
            work.wait()

    def _send(self, tensor: torch.Tensor, to: int, message: Message, is_header: bool = False) -> None:
        with set_up() if is_header else contextlib.nullcontext():
            work = dist.isend(tensor, group=self.group, group_dst=to, tag=self._tag(message, is_header))
        self.going.setdefault(message, []).append(work)

    def _receive(self, message: Message | None) -> None:
        """Begin to receive it, if it comes from another rank and its size is known by now."""
        if message is None or message in self.coming or (source := self.home[message.stage]) == self.rank:
            return
        if (size := self.sizes.get(_output(message))) is not None:
            buffer = torch.empty(size.shape, dtype=size.dtype)
            work = dist.irecv(buffer, group=self.group, group_src=source, tag=self._tag(message))
            self.coming[message] = buffer, work

    def _arrived(self, message: Message) -> torch.Tensor | None:
        tensor, work = self.coming.pop(message, (None, None))
        if tensor is None:
            return None
        work.wait()
        if message.what == "g":
            self._wait(Message("x", message.stage - 1, message.micro))  # which was received, then
        return tensor.to(self.device)

    def _hear_size(self, message: Message) -> None:
        header = _header(None)
        with set_up():
            dist.recv(header, group=self.group, group_src=self.home[message.stage], tag=self._tag(message, True))
        dtype, dimensions, *shape = header.tolist()
        if dtype != _FAILED:
            self.sizes[_output(message)] = torch.empty(shape[:dimensions], dtype=DTYPES[dtype], device="meta")

    def _tag(self, message: Message, is_header: bool = False) -> int:
        return 4 * (message.micro * (self.last + 1) + message.stage) + 2 * (message.what == "g") + is_header


def _output(message: Message) -> tuple[int, int]:
    """The stage and micro-batch whose output has the message's size."""
    return message.stage - (message.what == "g"), message.micro


def _header(tensor: torch.Tensor | None) -> torch.Tensor:
    row = [_FAILED] if tensor is None else [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    return torch.tensor(row + [0] * (2 + MOST_DIMENSIONS - len(row)))
