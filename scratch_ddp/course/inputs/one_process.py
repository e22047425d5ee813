"""Worlds of any number of ranks in this process: for answers that are made of collectives.

Each rank has a thread, and one of them runs at a time: until it waits for a collective that some rank has not called
yet, or ends. That takes less time than real messages do, so an answer can be tried with many inputs and numbers of
ranks. The ranks of the trial share the cases.
"""

import contextlib
import ctypes
import functools
import io
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from scratch_ddp.course.attempt import TimeIsUp, in_short, lines_of_thread
from scratch_ddp.course.message_sizes import RankThread
from scratch_ddp.course.stand_in_group import ConnectionLost, Work, known_to_torch
from scratch_ddp.course.trial import Trial
from scratch_ddp.course.wording import ranks, times
from scratch_ddp.instruments.traffic import Counts
from scratch_ddp.instruments.traffic.calls import METHODS, Call

_COMBINED = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}


_KNOWN = ("all_gather", "all_reduce", "reduce", "broadcast", "gather", "scatter", "barrier")


class World:
    """What became of the ranks when each has called the answer with its arguments: `given`, by rank.

    results: of each call. printed: what each printed. counts: what each sent. complaint: that some did not return.
    place: how complaints name it. lost: the collective or message that raises ConnectionLost on every rank that waits
    for it, by its number.
    """

    place = ""

    def __init__(self, answer: Callable, given: list[tuple], lost: int | None = None):
        self.given, self._seats = given, [_Seat(self, rank, len(given)) for rank in range(len(given))]
        self.meetings: list[dict[int, _Gift]] = []  # the collectives in their order: by rank, what it has brought
        self.mail: dict[tuple[int, int], list[torch.Tensor]] = {}  # by sender and receiver: what was not received yet
        self.cancelled, self.mismatch, self.lost = False, "", lost
        self._running: _Seat | None = None
        self._nobody_can_go_on = _locked()
        with contextlib.ExitStack() as registered:
            for seat, args in zip(self._seats, given, strict=True):
                seat.act = functools.partial(answer, *args)
                registered.enter_context(known_to_torch(seat, "one process"))
            self._run()
        self.results = [seat.result for seat in self._seats]
        self.printed = [seat.printed.getvalue() for seat in self._seats]
        self.counts = [seat.counts for seat in self._seats]
        self.complaint = self._what_went_wrong() if lost is None else self._what_was_swallowed()
        while self._seats:
            self._seats.pop().let_go()

    def _run(self) -> None:
        stdout, default = sys.stdout, dist.group.WORLD
        try:
            self.pass_on()
            self._nobody_can_go_on.acquire()
        except TimeIsUp as stop:
            if self._running is not None:
                stop.elsewhere = self._running.lines()
            raise
        finally:
            self.cancelled = True
            for seat in self._seats:
                seat.end()
            sys.stdout = stdout
            dist.distributed_c10d._update_default_pg(default)

    def pass_on(self) -> None:
        """Let the first rank run that can go on. Called by the one that has run, which then waits."""
        if self.cancelled:
            return
        self._running = next((seat for seat in self._seats if seat.can_go_on()), None)
        if self._running is None:
            self._nobody_can_go_on.release()
            return
        dist.distributed_c10d._update_default_pg(self._running)
        sys.stdout = self._running.printed
        self._running.go_on()

    def _what_went_wrong(self) -> str:
        if self.mismatch:
            return self.mismatch
        for rank, seat in enumerate(self._seats):
            if seat.error is not None and not isinstance(seat.error, _ForEver):
                return f"rank {rank} raised {in_short(seat.error)}"
        waiting = [rank for rank, seat in enumerate(self._seats) if seat.error is not None]
        if waiting:
            return f"{ranks(waiting).lower()} would wait for ever"
        for (sender, receiver), left in self.mail.items():
            if left:
                return f"rank {sender} sends to rank {receiver} what is never received"
        return ""

    def _what_was_swallowed(self) -> str:
        for rank, seat in enumerate(self._seats):
            if seat.has_lost and seat.error is None:
                return f"rank {rank} returned, though {seat.has_lost} raised an error: let the caller hear of it"
        return ""

    def too_many_messages(self, number: int, of_bytes: int) -> str:
        """That a rank sends more messages than `number`, or more bytes than in so many, as a complaint."""
        for counts in self.counts:
            if counts.messages > number:
                return f"sends {counts.messages} messages, budget {number}"
            if counts.bytes_sent > number * of_bytes:
                return f"sends {counts.bytes_sent:,} bytes, budget {number * of_bytes:,}"
            if others := counts.calls.keys() - {"send", "recv"}:
                return f"calls {min(others)}, should be made of send and recv only"
        return ""

    def other_roots(self, root: int) -> str:
        """That a collective has another root, as a complaint."""
        found = {gift.call.peer for meeting in self.meetings for gift in meeting.values()} - {root, None}
        return f"goes by way of rank {found.pop()}" if found else ""

    def over_budget(self, calls: Mapping[str, int], wire_bytes: int) -> str:
        """That a rank calls more than `calls`, or sends more than these bytes on the wire, as a complaint."""
        for counts in self.counts:
            for name, number in counts.calls.items():
                if number > calls.get(name, 0):
                    return f"calls {name} {times(number)}, budget {calls.get(name, 0)}"
        most = max(counts.wire_bytes for counts in self.counts)
        return f"{most:,} bytes from one rank, budget {wire_bytes:,}" if most > wire_bytes else ""


def tried_in_worlds(
    trial: Trial, cases: Mapping[str, Callable[[], list[tuple]]], using: Callable | None = None
) -> Iterator[tuple[str, World]]:
    """Each rank of the trial tries its share of the cases; yields a case and what became of it.

    cases: by name, what makes the arguments, by rank of the world. using: called as using(answer, *args) in place of
    answer(*args). Of a case that does not end it complains. Two ranks try their first case once more, with a collective
    that raises, the first or the second: of it a rank may not return.
    """
    makers = list(cases.items())[trial.rank :: trial.size]
    again = makers[0][1]() if makers and trial.rank < 2 else []
    mine = {case: make() for case, make in makers}
    worlds: dict[str, World] = {}
    swallowed, broken = "", f"if there were {_in_words(len(again))}, and a connection broke"

    def try_all(answer: Callable) -> None:
        nonlocal swallowed
        if using:
            answer = functools.partial(using, answer)
        for case, given in mine.items():
            place = f"if there were {_in_words(len(given))}, {case}"
            with trial.part(place):
                worlds[case] = World(answer, given)
            worlds[case].place = f"{place}:"
        if again:
            with trial.part(broken):
                swallowed = World(answer, again, lost=trial.rank).complaint

    trial.call(using=try_all)
    trial.criterion("runs", swallowed, f"{broken}:")
    for case, world in worlds.items():
        trial.criterion("runs", world.complaint, world.place)
        if not world.complaint:
            yield case, world


def _in_words(n: int) -> str:
    return f"{n} ranks" if n > 1 else "one rank only"


class _ForEver(BaseException):
    """Raised in a rank that waits for a collective which some rank never calls."""


class _Gift:
    """What a rank brings to a collective: copies of its tensors, and what the collective is."""

    def __init__(self, call: Call, tensors: list[torch.Tensor], op: Any):
        self.call, self.op, self.tensors = call, op, [tensor.detach().clone() for tensor in tensors]
        sizes = [(tensor.numel(), tensor.dtype) for tensor in tensors]
        self.kind = call.name, call.peer, op, [] if call.name == "scatter" else sizes  # its root alone brings tensors

    def __str__(self) -> str:
        sizes = [f"{tensor.numel()} × {str(tensor.dtype).removeprefix('torch.')}" for tensor in self.tensors]
        root = "" if self.call.peer is None else f" with root {self.call.peer}"
        return f"{self.call.name}{' of ' if sizes else ''}{' and '.join(sizes)}{root}"


class _Seat(dist.ProcessGroup):
    """The default group as one of the ranks sees it, and the thread of this rank.

    collectives, waits: how many of them it has started, and how often it has waited.
    """

    def __init__(self, world: World, rank: int, size: int):
        super().__init__(rank, size)
        self._world, self._rank, self._size, self.collectives = world, rank, size, 0
        self.result, self.error, self.printed, self.counts = None, None, io.StringIO(), Counts()
        self.act: Callable[[], Any] | None = None  # what its thread does
        self._thread: RankThread | None = None
        self._may_run = _locked()
        self._awaited: Callable[[], bool] | None = None  # where it waits: whether that has come
        self._ended = False
        self.waits, self.has_lost = 0, ""  # in which call its connection was lost
        # As attributes of the object: `traffic` replaces methods of the class, and these messages are not sent.
        for method in METHODS:
            setattr(self, method, functools.partial(self._called, method))

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def can_go_on(self) -> bool:
        return not self._ended and (self._awaited is None or self._awaited())

    def go_on(self) -> None:
        if self._thread is None:
            self._thread = RankThread(target=self._run, daemon=True)
            self._thread.start()
        else:
            self._may_run.release()

    def _run(self) -> None:
        try:
            self.result = self.act()
        except BaseException as error:  # noqa: BLE001  SystemExit as well
            self.error = error
        finally:
            self._ended = True
            self._world.pass_on()

    def wait_until(self, has_come: Callable[[], bool]) -> None:
        """Let the others run until then."""
        if threading.current_thread() is not self._thread:
            raise RuntimeError("waits for a message of another call: calls share what one of them keeps")
        while not has_come():
            self._awaited = has_come
            self._world.pass_on()
            self._may_run.acquire()
            if self._world.cancelled:
                raise _ForEver
            self._awaited = None

    def lines(self) -> list[tuple[str, int | None]]:
        """Where its thread is."""
        return lines_of_thread(self._thread.ident) if self._thread else []

    def end(self) -> None:
        if self._ended or self._thread is None:
            return
        if self._awaited is None:  # it computes for ever
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread.ident), ctypes.py_object(_ForEver))
        with contextlib.suppress(RuntimeError):  # it has been released
            self._may_run.release()
        self._thread.join(1.0)

    def let_go(self) -> None:
        """Of what refers to itself in a circle: else its tensors would be freed only some time later."""
        vars(self).clear()

    def _called(self, method: str, *args: Any, **options: Any) -> Work:
        name, position = METHODS[method]
        given = [*args, *options.values()]
        op = next((value.reduceOp.op for value in given if hasattr(value, "reduceOp")), None)
        root = next((value.rootRank for value in given if hasattr(value, "rootRank")), None)
        tensors = flat(given[position]) if position is not None else []
        if name == "all_gather" and not all(tensor.is_contiguous() for tensor in tensors):  # as NCCL; gloo copies it
            raise ValueError("all_gather takes contiguous tensors only, got a strided one")
        if any(tensor.is_meta for tensor in tensors):
            raise RuntimeError("a tensor on device 'meta' has no data that could be sent")
        payload = sum(tensor.nbytes for tensor in tensors)
        peer = given[1] if name in ("send", "recv") else root
        call = Call(name, payload, tuple(range(self._size)), self._rank, peer)
        self.counts.add(call)
        if name in ("send", "recv"):
            return self._message(name, tensors[0], peer)
        number, self.collectives = self.collectives, self.collectives + 1
        if number == len(self._world.meetings):
            self._world.meetings.append({})
        meeting = self._world.meetings[number]
        gift = meeting[self._rank] = _Gift(call, tensors, op)
        first = next(iter(meeting.values()))
        if gift.kind != first.kind:
            mismatch = f"rank {first.call.rank} calls {first}, rank {self._rank} calls {gift}"
            self._world.mismatch = self._world.mismatch or mismatch
            raise ValueError(mismatch)
        return Work(lambda: self._wait(number, name, given), flat(given[0]) if tensors else ())

    def _come_to_a_wait(self, name: str) -> None:
        number, self.waits = self.waits, self.waits + 1
        if number == self._world.lost:
            self.has_lost = name
            raise ConnectionLost

    def _message(self, name: str, tensor: torch.Tensor, peer: int) -> Work:
        if not 0 <= peer < self._size:
            raise ValueError(f"there is no rank {peer} among {self._size}")
        ends = (self._rank, peer) if name == "send" else (peer, self._rank)
        box = self._world.mail.setdefault(ends, [])
        if name == "send":
            box.append(tensor.detach().clone())
            return Work(lambda: None)

        def receive() -> None:
            self._come_to_a_wait(name)
            self.wait_until(lambda: bool(box))
            sent = box.pop(0)
            if (sent.numel(), sent.dtype) != (tensor.numel(), tensor.dtype):
                raise ValueError(f"rank {ends[0]} sends another number of elements, or another dtype, than is received")
            with torch.no_grad():
                tensor.copy_(sent.view_as(tensor))

        return Work(receive, [tensor])

    def _wait(self, number: int, name: str, given: list) -> None:
        self._come_to_a_wait(name)
        self.wait_until(lambda: len(self._world.meetings[number]) == self._size)
        brought = [self._world.meetings[number][rank] for rank in range(self._size)]
        root = brought[0].call.peer
        with torch.no_grad():
            if name == "all_gather":
                pieces = [tensor for gift in brought for tensor in gift.tensors]
                outputs = flat(given[0])
                if len(outputs) == 1 and self._size > 1:
                    outputs = list(outputs[0].view(-1).chunk(self._size))
                for output, piece in zip(outputs, pieces, strict=True):
                    output.copy_(piece.view_as(output))
            elif name == "all_reduce" or (name == "reduce" and root == self._rank):
                for place, tensor in enumerate(flat(given[0])):
                    tensor.copy_(_sum([gift.tensors[place] for gift in brought], brought[0].op))
            elif name == "broadcast":
                for tensor, sent in zip(flat(given[0]), brought[root].tensors, strict=True):
                    tensor.copy_(sent)
            elif name == "gather" and root == self._rank:
                for output, gift in zip(flat(given[0]), brought, strict=True):
                    output.copy_(gift.tensors[0])
            elif name == "scatter":
                flat(given[0])[0].copy_(brought[root].tensors[self._rank])
            elif name not in _KNOWN:
                raise NotImplementedError(f"{name} can't be tried in one process")


def _locked() -> threading.Lock:
    """One thread waits to acquire it, another releases it. That is quicker than a semaphore."""
    lock = threading.Lock()
    lock.acquire()
    return lock


def _sum(parts: list[torch.Tensor], op: Any) -> torch.Tensor:
    if op == dist.ReduceOp.AVG:
        return functools.reduce(torch.add, parts) / len(parts)
    return functools.reduce(_COMBINED[op], parts)


def flat(tensors: Any) -> list[torch.Tensor]:
    """The tensors of a tensor, a list of them, or a list of lists."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [tensor for each in tensors for tensor in flat(each)]
