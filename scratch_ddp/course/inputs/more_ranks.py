"""More ranks than there are: an answer made of messages is run for each of them in this process, one after the other.

A rank receives what its sender sent, in this round or in the one before; in the first round that may be nothing. The
rounds are repeated until one of them changes nothing. Then every rank has received what it would have received. Who
would have waited for whom is computed from the order of each rank's calls, as `traffic` does.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from scratch_ddp.course.attempt import MessageLog, left_over
from scratch_ddp.course.message_sizes import NO_SENDER
from scratch_ddp.course.stand_in_group import ConnectionLost, Work, known_to_torch
from scratch_ddp.instruments.traffic import Counts, Totals
from scratch_ddp.instruments.traffic.calls import METHODS, Call
from scratch_ddp.instruments.traffic.rounds import Start, Wait

Messages = dict[tuple[int, int, int], torch.Tensor]  # by sender, receiver and number: what was sent


class MoreRanks:
    """parts: the tensor of each rank. root: a rank that the answer is given as its second argument.

    Afterwards `tensors` are the ranks' tensors, `results` what each call returned, `totals` what was sent, `largest`
    the bytes of the largest message, `buffers` how many tensors a rank has received into and still holds, at most, and
    `room` their bytes beside those of its own tensor. `left_over` says what was sent and not received, `swallowed` that
    one of two ranks returned though its connection was lost.
    """

    def __init__(self, parts: list[torch.Tensor], root: int | None = None):
        self._parts, self._root, self._size = parts, root, len(parts)
        self.tensors, self.results = list(parts), [None] * len(parts)

    def __call__(self, answer: Callable) -> None:
        messages: Messages = {}
        for number in range(4 * self._size):
            before, messages = messages, {}
            first = self._root or 0  # in a tree, the root
            order = [*range(first, self._size), *range(first)]
            if self._root is not None and number % 2:  # in a tree, messages go up and down; in a ring, only up
                order.reverse()
            played = {rank: self._played(answer, rank, before, messages) for rank in order}
            seats = [played[rank] for rank in range(self._size)]
            if before.keys() == messages.keys() and all(_same(before[key], messages[key]) for key in messages):
                break
        self.totals = Totals.of([(seat.counts, seat.events) for seat in seats])
        self.largest = max((call.payload for seat in seats for call in seat.log.calls), default=0)
        self.buffers, self.room = max(seat.buffers for seat in seats), max(seat.room for seat in seats)
        self.left_over = left_over([seat.log.as_fact() for seat in seats])

        self.swallowed = self._swallowed(answer, messages)

    def _swallowed(self, answer: Callable, messages: Messages) -> str:
        """That one of two ranks returns though it has lost its connection, as a complaint."""
        for rank in range(2):
            try:
                seat = self._played(answer, rank, messages, {}, lost=True)
            except Exception:  # noqa: BLE001, S112  whatever the answer makes of it
                continue
            if call := next(iter(seat.log.calls), None):
                return f"rank {rank} returned, though {call.name} raised an error: let the caller hear of it"
        return ""

    def _played(self, answer: Callable, rank: int, before: Messages, messages: Messages, lost: bool = False) -> "_Seat":
        """Run the answer as rank `rank`. lost: as one that has lost its connection."""
        tensor = self._parts[rank].clone()
        seat = _Seat(rank, tensor, self._size, before, messages, lost)
        with seat.registered() as members:
            root = () if self._root is None else (members[self._root],)
            result = answer(tensor, *root, group=seat)
        if not lost:
            self.results[rank], self.tensors[rank] = result, tensor
        return seat


class _Seat(dist.ProcessGroup):
    """The group as one of its ranks sees it."""

    def __init__(self, rank: int, own: torch.Tensor, size: int, before: Messages, messages: Messages, lost: bool):
        super().__init__(rank, size)
        self._own, self._lost = own.untyped_storage().data_ptr(), lost
        self._rank, self._size, self._before, self._messages = rank, size, before, messages
        self.log, self.counts, self.events = MessageLog(range(size)), Counts(), []
        self._numbers: dict[tuple[int, int], int] = {}
        self._received_into: list[weakref.ref] = []
        self.buffers = self.room = 0
        # As attributes of the object: `traffic` replaces methods of the class, and these messages are not sent.
        for method in METHODS:
            setattr(self, method, functools.partial(self._refuse, METHODS[method][0]))
        self.send, self.recv, self.recv_anysource = self._send, self._receive, self._receive_from_any

    def __repr__(self) -> str:
        return f"of {self._size} ranks"

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    @contextlib.contextmanager
    def registered(self) -> Iterator[list[int]]:
        """Known to torch.distributed as a group in which this process is rank `rank`. Yields its global ranks."""
        own = dist.get_rank()
        others = [number for number in range(self._size + 1) if number != own]
        members = [*others[: self._rank], own, *others[self._rank :]][: self._size]
        with known_to_torch(self, "more ranks", members):
            yield members

    def _send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Work:
        self._messages[self._next(self._rank, dst)] = tensors[0].detach().clone()
        return self._started("send", tensors[0], dst)

    def _receive(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> Work:
        key = self._next(src, self._rank)
        self._received_into = [each for each in self._received_into if each() is not None and each() is not tensors[0]]
        self._received_into.append(weakref.ref(tensors[0]))
        self.buffers = max(self.buffers, len(self._received_into))
        held = [each.untyped_storage() for each in (each() for each in self._received_into) if each is not None]
        bytes_by_place = {storage.data_ptr(): storage.nbytes() for storage in held}
        self.room = max(self.room, sum(bytes_by_place.values()) - bytes_by_place.get(self._own, 0))
        sent = self._messages.get(key, self._before.get(key))
        if sent is not None:
            if (sent.numel(), sent.dtype) != (tensors[0].numel(), tensors[0].dtype):
                what = f"rank {src} sends {_described(sent)}, rank {self._rank} receives into {_described(tensors[0])}"
                raise ValueError(what)
            with torch.no_grad():
                tensors[0].copy_(sent.view_as(tensors[0]))
        return self._started("recv", tensors[0], src)

    def _refuse(self, name: str, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(f"{name}: the answer should be made of send and recv only")

    def _receive_from_any(self, *_: Any) -> NoReturn:
        raise ValueError(NO_SENDER)

    def _next(self, sender: int, receiver: int) -> tuple[int, int, int]:
        peer = receiver if sender == self._rank else sender
        if not 0 <= peer < self._size:
            raise ValueError(f"there is no rank {peer} among {self._size}")
        self._numbers[sender, receiver] = self._numbers.get((sender, receiver), -1) + 1
        return sender, receiver, self._numbers[sender, receiver]

    def _started(self, name: str, tensor: torch.Tensor, peer: int) -> Work:
        call = Call(name, tensor.numel() * tensor.element_size(), tuple(range(self._size)), self._rank, peer)
        self.log.started(call)
        self.counts.add(call)
        number = len(self.log.calls) - 1
        ends = (self._rank, peer) if name == "send" else (peer, self._rank)
        self.events.append(Start(number, ("message", *ends), 2, 1))
        return Work(lambda: self._waited(number))

    def _waited(self, number: int) -> None:
        if self._lost:
            raise ConnectionLost
        self.events.append(Wait(number))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.numel()} × {str(tensor.dtype).removeprefix('torch.')}"
