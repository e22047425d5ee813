"""A rank's forward and backward passes, in step with the other ranks'.

The hooks of `hooks` say where the model is; from that follows which unit is gathered, used, freed or reduced next.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch

from scratch_ddp.common.agreement import raise_everywhere
from scratch_ddp.fsdp.checks import Checks
from scratch_ddp.fsdp.desync import AGAIN, ALONE, BACKWARD, EVALUATION, FORWARD, OTHERS, SYNC, RollCall, digest
from scratch_ddp.fsdp.parts import Parts
from scratch_ddp.fsdp.schedule import Schedule
from scratch_ddp.fsdp.units import Unit

INTERRUPTED = "the last forward or backward pass was interrupted; all gradients since the last step are dropped"
NUMBERS = 5  # that the ranks exchange at every meeting, beside the flags of some


class Passes:
    """Leads the units, the root's first, through the passes. Every pass begins with a roll call.

    `prefetch`: how many units ahead are gathered; `free_after_forward`: False leaves them there for backward.
    """

    def __init__(
        self, parts: Parts, roll_call: RollCall, checks: Checks, prefetch: int = 1, free_after_forward: bool = True
    ):
        self.root, *self.units = parts.units  # these in the order of their first use, as far as it is known
        self.replicated, self.roll_call, self.checks = parts.replicated, roll_call, checks
        self.prefetch, self.free_after_forward = prefetch, free_after_forward
        self.now = ""  # "forward", "backward", "synchronisation" or nothing
        self.schedule = Schedule([])
        self._used: list[Unit] = []  # in the last forward pass
        self._turns = 0  # how many a unit has, at most, in the backward pass to come
        self._several = False  # that is more than one on any rank
        self._changes = 0  # of the shards, before the last forward pass
        self.graph = 0  # which graphs of autograd are still good: not those from before passes were started over

    def begin_forward(self) -> None:
        """Have the root here, and the first units on their way. All is gathered anew, since shards may have changed."""
        if self.now == "backward":  # the whole model is recomputed, for activation checkpointing
            return
        self.checks.settle()
        self.meet(FORWARD if torch.is_grad_enabled() else EVALUATION)
        self.replicated.collect()
        self.replicated.refresh()
        for unit in [self.root, *self.units]:
            unit.free()
        self.now, self._used = "forward", []
        self._turns += torch.is_grad_enabled()
        self._changes = self.checks.changes()
        order = [self.root, *self.units]
        self.schedule = Schedule(order, gathered=order, prefetch=self.prefetch)
        self.schedule.before(self.root)
        self.root.use()

    def before_forward(self, unit: Unit) -> None:
        """Have the unit here, and the next ones on their way."""
        if not self.now:
            self.meet(ALONE)
            self._turns += 1
            self._changes = self.checks.changes()
        elif self.now == "forward":
            self.schedule.before(unit)
            self._gather_again(unit)
            self._used += [unit] * (unit not in self._used)
        else:  # computed again in backward, for activation checkpointing
            self._take_turn(unit, self.schedule.gather)
        unit.use()

    def after_forward(self, unit: Unit) -> None:
        """Free the unit. Where it was computed again in backward, its backward follows at once."""
        if self.now != "backward" and not self._keeps(unit):
            unit.free()

    def end_forward(self) -> None:
        """Gather what only other ranks have used, and free all that is not kept for backward."""
        if self.now != "forward":
            return
        self.schedule.finish()
        for unit in [self.root, *self.units]:
            unit.use() if self._keeps(unit) else unit.free()
        self.now = ""

    def before_backward(self, unit: Unit, graph: int | None = None) -> None:
        """Have the unit here again; the first call begins a backward pass."""
        if graph not in (None, self.graph):
            raise RuntimeError(f"this loss is from before an interruption ({INTERRUPTED}): run the forward pass again")
        if self.now == "forward":  # torch.autograd.grad inside the model's forward
            self._gather_again(unit)
        elif not self.now:
            self.meet(BACKWARD)
            self._begin_backward()
        if self.now == "backward" and unit is not self.root:
            self._take_turn(unit, self.schedule.before)
        unit.use()

    def _gather_again(self, unit: Unit) -> None:
        """Gather a unit whose turn in this forward pass is over. All ranks must, or none, so all are asked."""
        if not unit.is_coming:
            self.schedule.finish()  # or a rank that does not might still be gathering others
            self.meet(AGAIN)
            self._turns += 1  # it will have as many turns in backward
            unit.gather()

    def _take_turn(self, unit: Unit, advance: Callable[[Unit], None]) -> None:
        """Gather a unit in the backward pass by advancing in the schedule; begin another pass where it is over."""
        advance(unit)
        if not unit.is_coming:  # its turn is over, and it has another one: for another forward pass
            self._end_pass()
            self.meet(BACKWARD)
            self._begin_backward(callback=False)
            self.schedule.before(unit)

    def after_backward(self, unit: Unit) -> None:
        """Free the unit, and let its gradients travel."""
        if self.now == "backward":
            unit.free()
            self.schedule.after(unit)
            if not self.checks.switch.do_sync:
                unit.keep_gradients()

    def synchronise(self, flags: Callable[[], list[int]]) -> list[int]:
        """Meet the ranks at the end of their backward passes; return the largest of each of the `flags` of any rank.

        As long as another rank is in a backward pass that this one does not have, take part in it.
        """
        while True:
            doing, largest = self.meet(SYNC, flags=flags)
            if doing == SYNC:
                return largest
            self._begin_backward(callback=False)
            self._end_pass()

    def _begin_backward(self, callback: bool = True) -> None:
        self.now = "backward"
        if callback:
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        self.root.gather()
        order = [*reversed(self.units), self.root]
        absent = [unit for unit in order if not unit.is_here and unit is not self.root]
        reduced = order if self.checks.switch.do_sync and not self._several else ()
        self.schedule = Schedule(order, absent, reduced, self.prefetch)
        self.schedule.start()
        self.root.use()

    def _end_backward(self) -> None:
        """Called by autograd when it is through."""
        self._end_pass()
        self._turns = 0

    def _end_pass(self) -> None:
        self.root.free()
        self.schedule.finish()
        for unit in [self.root, *self.units]:
            unit.free()
            if not self.checks.switch.do_sync:
                unit.keep_gradients()
        self.now = ""

    def _keeps(self, unit: Unit) -> bool:
        """True if what is gathered in a forward pass is left there for the backward pass."""
        if self.now != "forward" or not torch.is_grad_enabled():
            return False
        return not self.free_after_forward or unit is self.root or unit is self.units[-1]

    def meet(
        self, doing: str, lines: Sequence[str] = (), flags: Callable[[], list[int]] = list
    ) -> tuple[str, list[int]]:
        """Tell the ranks what this one is about to do; return what they do, and the largest of each of the flags.

        Raises ValueError or RuntimeError on every rank if any rank can't, or if they don't go together. If any rank was
        interrupted before, all of them start over.
        """
        wrong = self.checks.problem()
        if doing == BACKWARD and self._changes != self.checks.changes():
            wrong = wrong or "the parameters were changed between this forward pass and its backward pass"
        lines = [*lines, *self.checks.lines(passes=doing != OTHERS)]
        if doing in (BACKWARD, SYNC):
            lines += [unit.name for unit in [self.root, *self.units] if unit.is_here]
        order = digest([unit.name for unit in self._used])
        numbers = [wrong is not None, bool(self.now) and doing != AGAIN, self._turns > 1, order, -order]
        doing, numbers = self.roll_call(doing, lines, [*map(int, numbers), *([] if wrong else flags())])
        refused, interrupted, self._several, order, other_order, *numbers = numbers
        if refused:
            self.start_over()
            raise_everywhere(wrong, self.roll_call.group)
        if interrupted:
            self.start_over()
            if doing in (BACKWARD, SYNC):  # of gradients that are gone
                raise RuntimeError(INTERRUPTED)
            with warnings.catch_warnings():
                warnings.simplefilter("always")  # each time, not only the first
                warnings.warn(INTERRUPTED, stacklevel=2)
        if order == -other_order and doing in (FORWARD, EVALUATION):  # all ranks have used the units in one order
            self.units = [*self._used, *(unit for unit in self.units if unit not in self._used)]
        return doing, numbers

    def start_over(self) -> None:
        """Free everything and drop all gradients."""
        for unit in [self.root, *self.units]:
            unit.abandon()
        for parameter in (*self.replicated.parameters.values(), *self.replicated.masters.values()):
            parameter.grad = None
        self.now, self._used, self._turns = "", [], 0
        self.graph += 1

    @contextlib.contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Mark what must not be left half done: if it is, the next pass starts over."""
        self.now = "synchronisation"
        yield
        self.now = ""
