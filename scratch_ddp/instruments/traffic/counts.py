"""`traffic`: count what this rank sends and receives inside a block, and put the counts of all ranks together."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from scratch_ddp.common.accounting import is_set_up, set_up
from scratch_ddp.instruments.cost.wire import ring_rounds
from scratch_ddp.instruments.traffic.calls import Call
from scratch_ddp.instruments.traffic.intercept import listening
from scratch_ddp.instruments.traffic.rounds import Message, Start, Wait, depth, messages


@dataclass
class Counts:
    """What one rank sent and received. Bytes are payload: elements times element size, without protocol headers."""

    calls: dict[str, int] = field(default_factory=dict)  # by name; isend counts as send, irecv as recv
    messages: int = 0  # point-to-point messages sent
    messages_received: int = 0
    bytes_sent: int = 0  # in those messages
    bytes_received: int = 0
    payload_bytes: int = 0  # this rank's input to torch's own collectives
    collective_bytes: int = 0  # what this rank sends for those collectives, by the formula for a ring (`Call.sent`)

    @property
    def wire_bytes(self) -> int:
        """Bytes this rank sends: counted for messages, by the formula for a ring for torch's collectives."""
        return self.bytes_sent + self.collective_bytes

    def add(self, call: Call) -> None:
        self.calls[call.name] = self.calls.get(call.name, 0) + 1
        if call.name == "send":
            self.messages += 1
            self.bytes_sent += call.payload
        elif call.name == "recv":
            self.messages_received += 1
            self.bytes_received += call.payload
        else:
            self.payload_bytes += call.payload
            self.collective_bytes += call.sent


Report = tuple[Counts, list[Start | Wait]]


@dataclass
class Totals:
    """The counts of all ranks of a group, the same object on each of them."""

    per_rank: list[Counts]  # in the order of the ranks in the group
    _events: list[list[Start | Wait]] = field(repr=False)

    @classmethod
    def of(cls, reports: Sequence[Report]) -> "Totals":
        """reports: every rank's `Counted.report()`, in the order of the ranks."""
        return cls([counts for counts, _ in reports], [events for _, events in reports])

    @functools.cached_property
    def log(self) -> list[Message]:
        """The point-to-point messages, round by round."""
        return messages(self._events)

    @functools.cached_property
    def depth(self) -> int:
        """Longest chain of messages in which each waited for the one before (see `rounds`)."""
        return depth(self._events)

    @property
    def messages(self) -> int:
        return sum(counts.messages for counts in self.per_rank)

    @property
    def bytes_sent(self) -> int:
        return sum(counts.bytes_sent for counts in self.per_rank)

    @property
    def wire_bytes(self) -> int:
        return sum(counts.wire_bytes for counts in self.per_rank)

    @property
    def max_messages(self) -> int:
        """Messages sent by the rank that sent the most."""
        return max(counts.messages for counts in self.per_rank)

    @property
    def max_bytes_sent(self) -> int:
        """Bytes sent in messages by the rank that sent the most."""
        return max(counts.bytes_sent for counts in self.per_rank)

    @property
    def max_wire_bytes(self) -> int:
        return max(counts.wire_bytes for counts in self.per_rank)


@dataclass
class Counted(Counts):
    """What `traffic` yields: this rank's counts, and in `setup` those of the calls made under `set_up()`."""

    setup: Counts = field(default_factory=Counts)
    _log: list[tuple[str, Call]] = field(default_factory=list, repr=False)

    def over_ranks(self, group: dist.ProcessGroup | None = None) -> Totals:
        """Put the counts of all ranks together. A collective: every rank of `group` (default: all) must call it.

        Costs one all_gather_object, which counts as set-up.
        """
        reports = [None] * dist.get_world_size(group)
        with set_up():
            dist.all_gather_object(reports, self.report(), group=group)
        return Totals.of(reports)

    def report(self) -> Report:
        """What `Totals.of` needs of this rank; it can be pickled."""
        return Counts(**{name: getattr(self, name) for name in Counts.__dataclass_fields__}), self._events()

    def started(self, call: Call) -> None:
        if is_set_up():
            self.setup.add(call)
        else:
            self.add(call)
            self._log.append(("start", call))

    def waited(self, call: Call) -> None:
        self._log.append(("wait", call))

    def _events(self) -> list[Start | Wait]:
        events, numbers = [], {}
        for what, call in self._log:
            if what == "start":
                numbers[call] = len(numbers)
                events.append(Start(numbers[call], *_exchange(call)))
            elif call in numbers:  # neither set-up nor started before the block
                events.append(Wait(numbers[call]))
        return events


def _exchange(call: Call) -> tuple[tuple, int, int]:
    """(channel, parties, rounds) of a call: what `depth` needs to match it with the calls of other ranks."""
    if call.name not in ("send", "recv"):
        n = len(call.members)
        return ("collective", call.members), n, ring_rounds(call.name, n)
    here, there = call.members[call.rank], None if call.peer is None else call.members[call.peer]
    ends = (here, there) if call.name == "send" else (there, here)
    return ("message", *ends, call.members, call.tag), 2, 1


@contextlib.contextmanager
def traffic() -> Iterator[Counted]:
    """Count this rank's communication inside the block, through our functions and through torch.distributed.

    ```python
    with traffic() as counted:
        tree_broadcast(x)
    counted.calls, counted.messages, counted.bytes_sent, counted.wire_bytes   # this rank
    counted.over_ranks().depth                                                # all ranks: a collective
    ```
    Blocks may be nested. Each counts everything that runs inside it, on every process group. A call that raises is not
    counted; earlier counts stay. Counting itself sends nothing.

    A call is counted once, where it reaches a process group. That covers functions imported earlier, asynchronous
    calls, batches, the `_into_tensor`, `_tensor` and `_single` forms, DistributedDataParallel, FSDP, DTensor and
    functional collectives. Coalesced calls count as the one call they become. An object collective counts as the two or
    three calls it is made of, with the bytes of the pickle. What runs under `counted_as` counts as the call named
    there, waited for at once.

    Not seen: what bypasses process groups (new_group, stores, monitored_barrier, RPC, NVSHMEM), functional isend/irecv,
    and a group class written in Python that was defined inside the block. Calls from C++ to a plain group are seen in
    the thread that opened the block and in the backward passes it starts. For the depth, waiting is seen in
    `Work.wait()`; a call from C++ counts as waited for at once, a batch under NCCL as never waited for.
    Every tensor operation takes some microseconds longer inside the block: don't measure times there.
    """
    counted = Counted()
    with listening(counted):
        yield counted
