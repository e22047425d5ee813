"""In which order a pass gathers and reduces its units: the same order on every rank, whatever a rank then computes.

Collectives are matched by their order alone. If each rank gathered what it happens to need, a rank that skips a unit
would have the others' next message in its place. So the order is fixed before a pass begins, and a rank goes through
all of it, also through what it does not use itself.
"""

from collections.abc import Collection, Sequence

from scratch_ddp.fsdp.units import Unit


class Schedule:
    """The steps of one pass: calls of `Unit.gather` and `Unit.reduce`, done once each, in order.

    `order`: the units as they are expected to compute; `gathered` and `reduced`: those for which the pass has to do so.
    Before a unit computes, it is gathered and the next `prefetch` of those to be gathered are on their way, so that
    messages travel while units compute.
    """

    def __init__(
        self, order: Sequence[Unit], gathered: Collection[Unit] = (), reduced: Collection[Unit] = (), prefetch: int = 1
    ):
        self._steps: list[tuple[str, Unit]] = []
        self._done = 0
        self._ready: dict[Unit, int] = {}  # how many steps come before the unit computes
        self._over: dict[Unit, int] = {}  # and how many are done when it is through
        self._reducing: Unit | None = None  # whose gradients are under way
        ahead = [unit for unit in order if unit in gathered]
        needed = prefetch
        self._add_gathers(ahead, needed)
        self._start = len(self._steps)
        for unit in order:
            needed += unit in gathered
            self._add_gathers(ahead, needed)
            self._ready[unit] = len(self._steps)
            if unit in reduced:
                self._steps.append(("reduce", unit))
            self._over[unit] = len(self._steps)

    def _add_gathers(self, ahead: list[Unit], needed: int) -> None:
        gathered = sum(what == "gather" for what, _ in self._steps)
        self._steps += [("gather", ahead.pop(0)) for _ in range(min(len(ahead), needed - gathered))]

    def start(self) -> None:
        """Do what comes before any unit computes."""
        self._advance(self._start)

    def gather(self, unit: Unit) -> None:
        """Gather the unit, and what comes before it."""
        step = ("gather", unit)
        self._advance(self._steps.index(step) + 1 if step in self._steps else 0)

    def before(self, unit: Unit) -> None:
        """Do what comes before the unit computes: gather it, and the next ones ahead of their turn."""
        self._advance(self._ready.get(unit, 0))

    def after(self, unit: Unit) -> None:
        """Do what comes before the unit is through."""
        self._advance(self._over.get(unit, 0))

    def finish(self) -> None:
        """Do what is left."""
        self._advance(len(self._steps))

    def _advance(self, to: int) -> None:
        while self._done < to:
            what, unit = self._steps[self._done]
            self._done += 1
            if what == "gather":
                unit.gather()
                continue
            self._finish_reducing()  # one message at a time: each has the size of its unit
            unit.reduce()
            self._reducing = unit

    def tidy(self) -> None:
        """Free the memory of a message that has come, if there is one."""
        if self._reducing is not None and self._reducing.is_reduced():
            self._finish_reducing()

    def _finish_reducing(self) -> None:
        if self._reducing is not None:
            self._reducing.finish_reduce()
            self._reducing = None
