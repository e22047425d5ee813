"""The depth of a run: its longest chain of messages in which each waited for the one before.

Each rank has a clock that counts rounds. A message takes one round and begins when both of its ends have posted it, as
a large message does. `wait()`, and so a blocking send or receive, holds its rank until the message has ended. So n-1
blocking sends from one rank are n-1 rounds deep, and n-1 `isend`s posted before the first wait are one round deep.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable
from typing import NamedTuple


class Start(NamedTuple):
    """A rank started its part of an exchange: a message (two parties) or a collective (the whole group)."""

    number: int  # of this rank's exchange, counted from 0
    channel: Hashable  # the k-th start on a channel at one end belongs to the k-th at the other end
    parties: int
    rounds: int


class Wait(NamedTuple):
    """A rank waited until its exchange `number` had ended."""

    number: int


class Message(NamedTuple):
    """A point-to-point message: the round in which it ended, and its two global ranks."""

    round: int
    sender: int
    receiver: int


def depth(logs: list[list[Start | Wait]]) -> int:
    """Rounds until every exchange in the logs has ended. There is one log per rank, in the order of its events."""
    return max(ends(logs).values(), default=0)


def messages(logs: list[list[Start | Wait]]) -> list[Message]:
    """The messages among the exchanges (their channels are ("message", sender, receiver, …)), round by round."""
    found = []
    for (channel, _), at in ends(logs).items():
        if channel[0] == "message" and None not in channel[1:3]:  # None: received from any rank, and never waited for
            found.append(Message(at, *channel[1:3]))
    return sorted(found)


def ends(logs: list[list[Start | Wait]]) -> dict[tuple[Hashable, int], int]:
    """The round in which each exchange ended. An exchange is (channel, how many came before it on that channel).

    A receive from a rank without a log, or one whose message never came, takes one round from where it started.
    """
    logs = [_numbered(log) for log in logs]
    clock, at = [0] * len(logs), [0] * len(logs)  # of each rank: the rounds so far, the next event's position
    begun: dict[Hashable, dict[int, int]] = defaultdict(dict)  # exchange -> the clock of each party at its start
    size: dict[Hashable, tuple[int, int]] = {}

    def end(exchange: Hashable) -> int:
        return max(begun[exchange].values()) + size[exchange][1]

    def advance(rank: int, alone: bool) -> bool:
        """Process the rank's next event unless it must wait. `alone`: don't wait for parties that never came."""
        event, exchange = logs[rank][at[rank]]
        if isinstance(event, Start):
            begun[exchange][rank] = clock[rank]
            size[exchange] = event.parties, event.rounds
        elif alone or len(begun[exchange]) == size[exchange][0]:
            clock[rank] = max(clock[rank], end(exchange))
        else:
            return False
        at[rank] += 1
        return True

    while unfinished := [rank for rank in range(len(logs)) if at[rank] < len(logs[rank])]:
        if not any(advance(rank, alone=False) for rank in unfinished):
            advance(unfinished[0], alone=True)
    return {exchange: end(exchange) for exchange in begun}


def _numbered(log: list[Start | Wait]) -> list[tuple[Start | Wait, Hashable]]:
    """Each event with the exchange it belongs to: (channel, how many came before on that channel)."""
    seen: Counter = Counter()
    exchanges = {}
    for event in log:
        if isinstance(event, Start):
            exchanges[event.number] = (event.channel, seen[event.channel])
            seen[event.channel] += 1
    return [(event, exchanges[event.number]) for event in log]
