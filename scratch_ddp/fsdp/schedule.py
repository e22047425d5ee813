"""In which order a pass gathers and reduces units, and how far ahead of their turn it gathers them (prefetch)."""

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence

from scratch_ddp.fsdp.unit import Unit

Turn = list[Unit]  # the units of one module, which compute together


class Schedule:
    """The collectives of a forward or backward pass: the same on every rank, whatever it computes.

    Collectives are matched by their order alone. So the steps are fixed before the pass begins, and a rank goes through
    all of them, also those of units that it does not use.
    `order`: the modules' units as they are expected to compute; `to_gather`, `to_reduce`: those that the pass gathers
    and reduces; `then`: what else it sends at its end. Before units compute, their all-gathers and those of the next
    `prefetch` modules have been started, so that messages travel while units compute.
    """

    def __init__(
        self,
        kind: str,
        order: Sequence[Turn] = (),
        to_gather: Collection[Unit] = (),
        to_reduce: Collection[Unit] = (),
        prefetch: int = 1,
        then: Iterable[Callable[[], None]] = (),
    ):
        self.kind = kind
        self._steps: list[Callable[[], None]] = []
        self._done = 0  # steps
        self._reached: dict[str, int] = {}  # by the module's name, how many steps are done before it computes
        self._left: dict[str, int] = {}  # and how many once it has computed
        self._reducing: Unit | None = None  # the last unit to be reduced
        ahead = [each for turn in order if (each := [unit.gather for unit in turn if unit in to_gather])]
        begun, needed = 0, prefetch
        for turn in filter(None, order):
            name, needed = turn[0].module_name, needed + any(unit in to_gather for unit in turn)
            self._steps += itertools.chain.from_iterable(ahead[begun:needed])
            begun = max(begun, needed)
            self._reached[name] = len(self._steps)
            self._steps += [functools.partial(self._reduce, unit) for unit in turn if unit in to_reduce]
            self._left[name] = len(self._steps)
        self._steps += then

    def reach(self, turn: Turn) -> None:
        """Do what comes before the units compute: start to gather them, and the next ones ahead of their turn."""
        self._advance(self._reached.get(turn[0].module_name, 0) if turn else 0)

    def leave(self, turn: Turn) -> None:
        """Do what comes once the units have computed."""
        self._advance(self._left.get(turn[0].module_name, 0))

    def finish(self) -> None:
        """Do the remaining steps, for which other ranks may wait."""
        self._advance(len(self._steps))

    def _advance(self, to: int) -> None:
        while self._done < to:
            self._steps[self._done]()
            self._done += 1  # one that failed is done again by `finish`: other ranks wait for its message

    def _reduce(self, unit: Unit) -> None:
        if self._reducing is not None:
            self._reducing.finish_reduce()  # one message at a time: each is as large as its unit
        unit.reduce()
        self._reducing = unit
