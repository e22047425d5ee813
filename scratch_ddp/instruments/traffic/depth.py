"""The depth of a run: its longest chain of messages in which each waited for the one before.

Each rank has a clock that counts rounds. A message takes one round and begins when both of its ends have posted it; a
collective takes the rounds of a ring. `wait()` holds its rank until the message has ended. So n-1 blocking sends from
one rank are n-1 rounds deep, and n-1 `isend`s posted before the first wait are one.
"""

from collections import Counter
from typing import NamedTuple

from scratch_ddp.instruments.cost.wire import ring_rounds
from scratch_ddp.instruments.traffic.calls import Call

Log = list[tuple[str, Call]]  # one rank's events in their order: ("start" or "wait", the call)


class Message(NamedTuple):
    """A point-to-point message: the round in which it ended, and its two global ranks."""

    round: int
    sender: int
    receiver: int


def depth(logs: list[Log]) -> int:
    """Rounds until every call in the logs has ended. There is one log per rank."""
    return max(_ends(logs).values(), default=0)


def messages(logs: list[Log]) -> list[Message]:
    """The messages in the logs, round by round."""
    ends = [(channel, end) for (channel, _), end in _ends(logs).items() if channel[0] == "message"]
    return sorted(Message(end, *channel[1:3]) for channel, end in ends if None not in channel)  # None: never received


def _ends(logs: list[Log]) -> dict[tuple, int]:
    """The round in which each exchange ended. An exchange is (channel, how many came before it on that channel).

    Going through the logs again and again moves the ends back until they agree.
    """
    ends: dict[tuple, int] = {}
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
                    rounds = 1 if call.name in ("send", "recv") else ring_rounds(call.name, len(call.members))
                    ends[exchange] = max(ends.get(exchange, 0), clock + rounds)
        if ends == before:
            break
    return ends


def _exchanges(log: Log) -> dict[Call, tuple]:
    """The k-th call on a channel at one end belongs to the k-th at the other end."""
    seen: Counter = Counter()
    found = {}
    for call in (call for event, call in log if event == "start"):
        channel = _channel(call)
        found[call] = channel, seen[channel]
        seen[channel] += 1
    return found


def _channel(call: Call) -> tuple:
    if call.name not in ("send", "recv"):
        return "collective", call.members
    here, there = call.members[call.rank], None if call.peer is None else call.members[call.peer]
    ends = (here, there) if call.name == "send" else (there, here)
    return "message", *ends, call.members, call.tag
