"""The depth of a run: its longest chain of messages each of which waited for the one before.

Clocks count rounds. A message takes one round and begins when both of its ends have called for it, as a large message
does; `wait()`, and so a blocking send or receive, holds its rank until the message is through. So n-1 blocking sends
from one rank are n-1 rounds deep, and n-1 `isend`s posted before the first wait are one round deep.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable
from typing import NamedTuple


class Start(NamedTuple):
    """A rank began its part of an exchange: of a message (two parties) or of a collective (the whole group)."""

    number: int  # counts this rank's exchanges
    channel: Hashable  # the k-th start on a channel at one end belongs to the k-th at the other
    parties: int
    rounds: int


class Wait(NamedTuple):
    """A rank waited until its exchange `number` was through."""

    number: int


class Message(NamedTuple):
    """A point-to-point message: the round in which it was through, and between which ranks (global ones)."""

    round: int
    sender: int
    receiver: int


def depth(logs: list[list[Start | Wait]]) -> int:
    """Rounds until everything in the logs, one for each rank in the order of its events, is through."""
    return max(ends(logs).values(), default=0)


def messages(logs: list[list[Start | Wait]]) -> list[Message]:
    """The messages among the exchanges, whose channels are ("message", sender, receiver, …), round by round."""
    found = []
    for (channel, _), at in ends(logs).items():
        if channel[0] == "message" and None not in channel[1:3]:  # None: received from anyone, and never waited for
            found.append(Message(at, *channel[1:3]))
    return sorted(found)


def ends(logs: list[list[Start | Wait]]) -> dict[tuple[Hashable, int], int]:
    """The round in which each exchange is through; an exchange is (channel, how many came before on that channel).

    A receive from a rank without a log, or one that never found its message, takes a round from where it began.
    """
    logs = [_numbered(log) for log in logs]
    clock, at = [0] * len(logs), [0] * len(logs)
    begun: dict[Hashable, dict[int, int]] = defaultdict(dict)  # exchange -> the clock of each party at its start
    size: dict[Hashable, tuple[int, int]] = {}

    def end(exchange: Hashable) -> int:
        return max(begun[exchange].values()) + size[exchange][1]

    def go_on(rank: int, alone: bool) -> bool:
        """Take the rank's next event if nothing holds it; `alone`: don't wait for parties that never came."""
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
        if not any(go_on(rank, alone=False) for rank in unfinished):
            go_on(unfinished[0], alone=True)
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
