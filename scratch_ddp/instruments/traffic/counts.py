"""`traffic`: count what this rank sends and receives inside a block, and put the counts of all ranks together."""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch.distributed as dist

from scratch_ddp.common.accounting import is_set_up, set_up
from scratch_ddp.instruments.traffic.calls import Call
from scratch_ddp.instruments.traffic.depth import Log, Message, depth, messages
from scratch_ddp.instruments.traffic.watch import listening


@dataclass
class Counts:
    """What one rank sent and received. Bytes are payload: elements times element size, without protocol headers."""

    calls: dict[str, int] = field(default_factory=dict)  # by name
    messages: int = 0  # point-to-point messages sent
    bytes_sent: int = 0  # in those messages
    payload_bytes: int = 0  # this rank's input to torch's own collectives
    collective_bytes: int = 0  # what this rank sends for those, by the formula for a ring

    @property
    def wire_bytes(self) -> int:
        """Bytes this rank sends: counted for messages, by the formula for a ring for torch's collectives."""
        return self.bytes_sent + self.collective_bytes

    def add(self, call: Call) -> None:
        self.calls[call.name] = self.calls.get(call.name, 0) + 1
        if call.name == "send":
            self.messages += 1
            self.bytes_sent += call.payload
        elif call.name != "recv":
            self.payload_bytes += call.payload
            self.collective_bytes += call.sent


@dataclass
class Totals:
    """The counts of all ranks of a group, the same on each of them. `per_rank` is in the order of its ranks."""

    per_rank: list["Counted"]

    @functools.cached_property
    def log(self) -> list[Message]:
        """The point-to-point messages, round by round."""
        return messages([counted.events for counted in self.per_rank])

    @functools.cached_property
    def depth(self) -> int:
        """Longest chain of messages in which each waited for the one before."""
        return depth([counted.events for counted in self.per_rank])

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
    def max_bytes_sent(self) -> int:
        """Bytes sent in messages by the rank that sent the most."""
        return max(counts.bytes_sent for counts in self.per_rank)

    @property
    def max_wire_bytes(self) -> int:
        return max(counts.wire_bytes for counts in self.per_rank)


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
    """Count this rank's communication inside the block, through our functions and through torch.distributed.

    Blocks may be nested. Each counts every call that reaches a process group inside it, once, whoever makes it. An
    object collective counts as the two or three calls that it is made of, and what runs under `counted_as` as the call
    named there. Counting itself sends nothing.

    Not seen: what bypasses process groups (new_group, stores, RPC), functional isend/irecv, and calls from C++ in
    threads other than the block's and its backward passes'. For the depth, waiting is seen in `Work.wait()` alone; a
    call from C++ to a plain group counts as waited for at once.
    """
    counted = Counted()
    with listening(counted):
        yield counted
