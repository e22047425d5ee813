"""`traffic`: count what this rank sends and receives inside a block, and put the counts of all ranks together.

Depth is the longest chain of messages in which each waited for the one before. Each rank has a clock that counts
rounds. A message takes one round and begins when both of its ends have posted it; a collective takes the rounds of a
ring. `wait()` holds its rank until the message has ended. So n-1 blocking sends from one rank are n-1 rounds deep, and
n-1 `isend`s posted before the first wait are one.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch.distributed as dist

from scratch_ddp.common.accounting import is_set_up, set_up
from scratch_ddp.instruments.cost.wire import ring_rounds
from scratch_ddp.instruments.traffic.calls import Call, listening

Log = list[tuple[str, Call]]  # one rank's events in their order: ("start" or "wait", the call)


class Message(NamedTuple):
    """A point-to-point message: the round in which it ended, and its two global ranks."""

    round: int
    sender: int
    receiver: int


@dataclass
class Counts:
    """What one rank sent and received. Bytes are payload: elements times element size, without protocol headers."""

    calls: dict[str, int] = field(default_factory=dict)  # by name
    messages: int = 0  # point-to-point messages sent
    bytes_sent: int = 0  # in those messages
    payload_bytes: int = 0  # this rank's input to torch's own collectives
    wire_bytes: int = 0  # sent by this rank in messages, and for those collectives, by the formula for a ring

    def add(self, call: Call) -> None:
        self.calls[call.name] = self.calls.get(call.name, 0) + 1
        self.wire_bytes += call.sent
        if call.name == "send":
            self.messages += 1
            self.bytes_sent += call.payload
        elif call.name != "recv":
            self.payload_bytes += call.payload


class Totals:
    """The counts of all ranks of a group, the same on each of them.

    per_rank: in their order · log: the messages, round by round · depth: see above · max_…: of whoever sent the most
    """

    def __init__(self, per_rank: list["Counted"]):
        ends = _ends([counted.events for counted in per_rank])
        found = (Message(end, *channel[1:3]) for (channel, _), end in ends.items() if channel[0] == "message")
        self.log = sorted(message for message in found if None not in message)  # None: never received
        self.per_rank, self.depth = per_rank, max(ends.values(), default=0)
        self.messages = sum(counts.messages for counts in per_rank)
        self.bytes_sent = sum(counts.bytes_sent for counts in per_rank)
        self.wire_bytes = sum(counts.wire_bytes for counts in per_rank)
        self.max_bytes_sent = max(counts.bytes_sent for counts in per_rank)
        self.max_wire_bytes = max(counts.wire_bytes for counts in per_rank)


@dataclass
class Counted(Counts):
    """This rank's counts, and in `setup` those of calls under `set_up()`. `events`: start and wait of every other."""

    setup: Counts = field(default_factory=Counts)
    events: Log = field(default_factory=list, repr=False)
    _begun: set[Call] = field(default_factory=set, repr=False)

    def over_ranks(self, group: dist.ProcessGroup | None = None) -> Totals:
        """Put the counts of all ranks together. Costs one all_gather_object, which counts as set-up."""
        counts: list[Counted] = [self] * dist.get_world_size(group)
        with set_up():
            dist.all_gather_object(counts, self, group=group)
        return Totals(counts)

    def started(self, call: Call) -> None:
        if is_set_up():
            self.setup.add(call)
        else:
            self.add(call)
            self._begun.add(call)
            self.events.append(("start", call))

    def waited(self, call: Call) -> None:
        if call in self._begun:  # neither set-up nor started before the block
            self.events.append(("wait", call))


@contextlib.contextmanager
def traffic() -> Iterator[Counted]:
    """Count this rank's communication inside the block: every call that reaches a process group, whoever makes it.

    Set-up is counted apart. An object collective counts as the calls that it is made of, and what runs under
    `counted_as` as the call named there. Blocks may be nested. Counting itself sends nothing.

    Not seen: what bypasses process groups (new_group, stores, RPC), functional isend/irecv, and calls from C++ in
    threads other than the block's and its backward passes'. For the depth, waiting is seen in `Work.wait()` alone; a
    call from C++ to a plain group counts as waited for at once.
    """
    counted = Counted()
    with listening(counted):
        yield counted


def _ends(logs: list[Log]) -> dict[tuple, int]:
    """The round in which each exchange ended: (channel, how many came before it on that channel). A log per rank."""
    ends: dict[tuple, int] = {}  # going through the logs again and again moves them back until they agree
    exchanges = [_exchanges(log) for log in logs]
    for _ in range(1 + sum(map(len, logs))):
        before = dict(ends)
        for log, exchange_of in zip(logs, exchanges, strict=True):
            clock = 0
            for event, call in log:
                exchange = exchange_of[call]
                if event == "wait":
                    clock = max(clock, ends[exchange])
                else:
                    rounds = ring_rounds(call.name, len(call.members))
                    ends[exchange] = max(ends.get(exchange, 0), clock + rounds)
        if ends == before:
            break
    return ends


def _exchanges(log: Log) -> dict[Call, tuple]:
    """The k-th call on a channel at one end belongs to the k-th at the other end."""
    seen: Counter = Counter()
    found = {}
    for call in (call for event, call in log if event == "start"):
        way = channel(call)
        found[call] = way, seen[way]
        seen[way] += 1
    return found


def channel(call: Call) -> tuple:
    """Where the ends of a call find each other: ("collective", ranks), or ("message", sender, receiver, ranks, tag)."""
    if call.name not in ("send", "recv"):
        return "collective", call.members
    here, there = call.members[call.rank], None if call.peer is None else call.members[call.peer]
    ends = (here, there) if call.name == "send" else (there, here)
    return "message", *ends, call.members, call.tag
