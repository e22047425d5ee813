"""Does everything that an answer sent arrive, and do the ranks agree on the collectives they called?

A message that nobody received, or a collective that some rank left out, stays in the process group and is taken for
something else by the next cell. The ledger of each rank is compared with the others' after each call.
"""

from collections import Counter
from typing import Any

from scratch_ddp.course.verdict import ranks, times
from scratch_ddp.instruments.traffic.calls import Call


class Ledger:
    """What one rank sent to and received from whom, and its collectives on all ranks, in order."""

    def __init__(self, size: int):
        self._size = size
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._collectives: list[str] = []
        self._any_source: set[Call] = set()

    def started(self, call: Call) -> None:
        if call.name == "send":
            self._sent[call.members[call.peer]] += 1
        elif call.name == "recv" and call.peer is None:
            self._any_source.add(call)
        elif call.name == "recv":
            self._received[call.members[call.peer]] += 1
        elif len(call.members) == self._size:
            self._collectives.append(call.name)

    def waited(self, call: Call) -> None:
        if call in self._any_source and call.peer is not None:  # now it is known who sent it
            self._any_source.remove(call)
            self._received[call.members[call.peer]] += 1

    def as_fact(self) -> dict[str, Any]:
        def by_peer(counts: Counter[int]) -> list[int]:
            return [counts[peer] for peer in range(self._size)]

        return {"sent": by_peer(self._sent), "received": by_peer(self._received), "collectives": self._collectives}


def left_over(ledgers: list[dict[str, Any]]) -> str:
    """What the ranks' ledgers say is still in the process group, in a sentence; "" if nothing is."""
    for source, ledger in enumerate(ledgers):
        for target, sent in enumerate(ledger["sent"]):
            received = ledgers[target]["received"][source]
            if sent > received:
                return f"Rank {source} sent to rank {target} {times(sent)}, rank {target} received {times(received)}."
            if sent < received:
                return f"Rank {target} waits for a message that rank {source} never sent."
    for rank, ledger in enumerate(ledgers):
        if ledger["collectives"] != ledgers[0]["collectives"]:
            return (
                f"{ranks([0])} called {_names(ledgers[0]['collectives'])}, "
                f"{ranks([rank]).lower()} {_names(ledger['collectives'])}."
            )
    return ""


def _names(collectives: list[str]) -> str:
    return ", ".join(f"{name} {times(number)}" for name, number in Counter(collectives).items()) or "no collective"
