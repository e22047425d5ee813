"""In which order a pass gathers and reduces its units: the same order on every rank, whatever a rank then computes.

Collectives are matched by their order alone. If each rank gathered what it happens to need, a rank that skips a unit
would receive the message of another one in its place. So the order is fixed before a pass begins, and a rank goes
through all of it, also through the units that it does not use.
"""

from collections.abc import Collection, Sequence

from scratch_ddp.fsdp.units import Unit


class Schedule:
    """The steps of one pass: calls of `Unit.gather` and `Unit.reduce`, done once each, in order.

    `order`: the units as they are expected to compute; `gathered` and `reduced`: those that the pass has to gather and
    reduce. Before a unit computes, its all-gather and those of the next `prefetch` units have been started, so that
    messages travel while units compute.
    """

    def __init__(
        self, order: Sequence[Unit], gathered: Collection[Unit] = (), reduced: Collection[Unit] = (), prefetch: int = 1
    ):
        self._steps: list[tuple[str, Unit]] = []
        self._done = 0  # steps
        self._before: dict[Unit, int] = {}  # how many steps are done before the unit computes
        self._after: dict[Unit, int] = {}  # and how many once it has computed
        self._reducing: Unit | None = None  # the last unit to be reduced, until its message has arrived
        ahead = [unit for unit in order if unit in gathered]
        needed = prefetch
        self._add_gathers(ahead, needed)
        self._at_start = len(self._steps)
        for unit in order:
            needed += unit in gathered
            self._add_gathers(ahead, needed)
            self._before[unit] = len(self._steps)
            if unit in reduced:
                self._steps.append(("reduce", unit))
            self._after[unit] = len(self._steps)

    def _add_gathers(self, ahead: list[Unit], needed: int) -> None:
        gathered = sum(what == "gather" for what, _ in self._steps)
        self._steps += [("gather", ahead.pop(0)) for _ in range(min(len(ahead), needed - gathered))]

    def start(self) -> None:
        """Do what comes before any unit computes."""
        self._advance(self._at_start)

    def gather(self, unit: Unit) -> None:
        """Gather the unit, after all that comes before it."""
        step = ("gather", unit)
        self._advance(self._steps.index(step) + 1 if step in self._steps else 0)

    def before(self, unit: Unit) -> None:
        """Do what comes before the unit computes: gather it, and the next ones ahead of their turn."""
        self._advance(self._before.get(unit, 0))

    def after(self, unit: Unit) -> None:
        """Do what comes once the unit has computed."""
        self._advance(self._after.get(unit, 0))

    def finish(self) -> None:
        """Do the remaining steps."""
        self._advance(len(self._steps))

    def free_reduced(self) -> None:
        """Free the memory of a reduced message, if it has arrived."""
        if self._reducing is not None and self._reducing.is_reduced:
            self._wait_for_reduce()

    def _advance(self, to: int) -> None:
        while self._done < to:
            what, unit = self._steps[self._done]
            self._done += 1
            if what == "gather":
                unit.gather()
                continue
            self._wait_for_reduce()  # one message at a time: each is as large as its unit
            unit.reduce()
            self._reducing = unit

    def _wait_for_reduce(self) -> None:
        if self._reducing is not None:
            self._reducing.wait_for_reduce()
            self._reducing = None
