"""What happens before and after each module's forward and backward, in step with the other ranks.

    forward         gather the root; for each module of units: gather, compute, free
    backward        gather the root; for each, in reverse order: gather, compute, free, reduce; reduce the root
    sync_gradients  reduce what backward could not, and hand the means out

A pass begins where the ranks meet, and its `Pass` then says in which order it gathers and reduces. Hooks in the model
call the methods of `Runtime`: see `hooks`.
"""

import functools
import itertools
import warnings
from collections.abc import Callable, Collection, Sequence

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.common.optimizer_steps import SYNC_FORGOTTEN
from scratch_ddp.common.replicas import broadcast_from_first, modules_of
from scratch_ddp.fsdp.meeting import AGAIN, ALONE, BACKWARD, EVALUATION, FORWARD, STEP, SYNC, Agreed, meet
from scratch_ddp.fsdp.unit import ROOT, Unit

SECOND_DERIVATIVES = (
    "second derivatives (create_graph=True) need parameters that are freed by then: an FSDP has first derivatives only"
)
CALLED_ALONE = "a unit is called by itself: call the whole model, or make that module the FSDP"
DROPPED = "all gradients since the last step are dropped"
Turn = list[Unit]  # the units of one module, which compute together


class Pass:
    """In which order a forward or backward pass gathers and reduces: the same on every rank, whatever it computes.

    Collectives are matched by their order alone. If each rank gathered what it happens to need, a rank that skips a
    unit would receive the message of another one in its place. So the steps are fixed before the pass begins, and a
    rank goes through all of them, also those of units that it does not use.
    `order`: the modules' units as they are expected to compute; `gathered` and `reduced`: those that the pass has to
    gather and reduce. Before units compute, their all-gathers and those of the next `prefetch` modules have been
    started, so that messages travel while units compute.
    """

    def __init__(
        self,
        kind: str,  # FORWARD, EVALUATION, BACKWARD or SYNC
        order: Sequence[Turn],
        gathered: Collection[Unit],
        reduced: Collection[Unit] = (),
        prefetch: int = 1,
    ):
        self.kind = kind
        self._steps: list[tuple[str, Unit]] = []
        self._done = 0  # steps
        self._reached: dict[str, int] = {}  # by the module's name, how many steps are done before it computes
        self._left: dict[str, int] = {}  # and how many once it has computed
        self._reducing: Unit | None = None  # the last unit to be reduced
        ahead = [each for turn in order if (each := [("gather", unit) for unit in turn if unit in gathered])]
        begun, needed = 0, prefetch
        for turn in filter(None, order):
            name, needed = turn[0].module_name, needed + any(unit in gathered for unit in turn)
            self._steps += itertools.chain.from_iterable(ahead[begun:needed])
            begun = max(begun, needed)
            self._reached[name] = len(self._steps)
            self._steps += [("reduce", unit) for unit in turn if unit in reduced]
            self._left[name] = len(self._steps)

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
            what, unit = self._steps[self._done]
            self._done += 1
            if what == "gather":
                unit.gather()
                continue
            if self._reducing is not None:
                self._reducing.finish_reduce()  # one message at a time: each is as large as its unit
            unit.reduce()
            self._reducing = unit


class Runtime:
    """Leads the units of a model through its passes.

    In a pass each unit has one turn: it is gathered, computes and is freed. A unit that is needed after its turn, or
    was not expected to have one, makes all ranks meet and begin another pass. Only a backward's first pass reduces;
    `sync_gradients` does the rest.

    `prefetch`: how many units ahead of their turn are gathered. `free_after_forward`: False keeps units for backward.
    `sync`: "backward" if gradients are synchronised when a backward ends. `do_sync()`: whether they are synchronised at
    the moment.
    """

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        group: dist.ProcessGroup | None,
        prefetch: int,
        free_after_forward: bool,
        sync: str,
        do_sync: Callable[[], bool],
    ):
        self.model, self.units, self.group = model, units, group
        turns: dict[str, Turn] = {ROOT: []}
        for unit in units:
            turns.setdefault(unit.module_name, []).append(unit)
        self.turns = turns  # by the name of the module
        self.roots, *self.others = turns.values()  # the others in the order of their use, as far as it is known
        self.prefetch, self.free_after_forward, self.sync, self.do_sync = prefetch, free_after_forward, sync, do_sync
        self.running: Pass | None = None
        self.restarts = 0  # after errors; backward through a graph from before one is refused
        self._used: list[Turn] = []  # in the last forward pass, in the order of their first turn
        self._needed: set[Unit] = set()  # those whose backward the last forward pass has made ready
        self._changes = 0  # of the parameters, before the last forward pass
        self._steps = 0  # of optimizers, that have come to their end since parameters were loaded
        self._buffers = self._persistent_buffers()
        self._renewals = self._renewals_of_group()

    # Forward

    def begin_forward(self) -> None:
        """Gather the root, and begin to gather the first units: all anew, since parameters may have changed."""
        if self._is_in(BACKWARD):  # the whole model is recomputed, for activation checkpointing
            return
        kind = FORWARD if torch.is_grad_enabled() else EVALUATION
        for unit in self.units:
            unit.adopt_trained()
        agreed = self.meet(kind)
        for unit in self.units:
            unit.free()
        if agreed.same_order:
            self.others = [*self._used, *(turn for turn in self.others if turn not in self._used)]
        self._used = []
        if kind == FORWARD:
            self._needed, self._changes = set(self.roots), self.changes()
        self.running = Pass(kind, [self.roots, *self.others], self.units, prefetch=self.prefetch)
        self._take_turn(self.roots)

    def before_forward(self, turn: Turn) -> None:
        """Gather the units of a module, and begin to gather the next ones."""
        if not self._is_in(FORWARD, EVALUATION, BACKWARD):
            self.meet(ALONE, problem=CALLED_ALONE)
        if not self._is_in(BACKWARD) and turn not in self._used:
            self._used.append(turn)
        self._take_turn(turn)

    def after_forward(self, turn: Turn, has_backward: bool) -> None:
        """Free the units. Where they were recomputed in backward, their backward follows at once."""
        if self._is_in(FORWARD):
            if not has_backward and not torch.is_grad_enabled():  # reentrant checkpointing will compute it again
                has_backward = any(shard.requires_grad for unit in turn for shard in unit.shards)
            self._needed.update(turn if has_backward else ())
        if not self._is_in(BACKWARD):
            self._free_after_forward(turn)

    def end_forward(self) -> None:
        """Gather what only other ranks have used, and free all that is not kept for backward."""
        if self._is_in(FORWARD, EVALUATION):
            self.running.finish()
            self._free_after_forward(self.units)
            self.running = None

    def _free_after_forward(self, units: list[Unit]) -> None:
        """Free them, but for those that stay gathered until the backward pass."""
        last = [*self.roots, *itertools.chain.from_iterable(self.others[-1:])]
        for unit in units:
            stays = not self.free_after_forward or unit in last
            if not (stays and self._is_in(FORWARD) and unit in self._needed and unit.is_gathered):
                unit.free()

    def _take_turn(self, turn: Turn) -> None:
        """Gather units. If their turn is over, or they were to have none, all ranks meet and begin another pass."""
        self.running.reach(turn)
        if not all(unit.is_available for unit in turn):
            self.running.finish()  # or a rank whose turn it is not might still be gathering others
            if self._is_in(BACKWARD):
                self._needed.update(turn)
                self._begin_backward(self.meet(BACKWARD, again=True))
            else:
                self.meet(AGAIN, turn[0].module_name)
                self.running = Pass(self.running.kind, [turn], turn)
            self.running.reach(turn)
        for unit in turn:
            unit.wait()

    # Backward

    def before_backward(self, turn: Turn, restarts: int) -> None:
        """Gather units again; the first call begins a backward pass. `restarts`: at the time of the forward pass."""
        if restarts != self.restarts:
            raise RuntimeError(f"this loss is from before an error ({DROPPED}): run the forward pass again")
        if not self._is_in(BACKWARD):
            forward = self.running  # the model computes a gradient in its forward pass
            if forward is not None:
                forward.finish()
            agreed = self.meet(BACKWARD, problem=SECOND_DERIVATIVES if torch.is_grad_enabled() else None)
            torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self._end_backward, forward))
            self._begin_backward(agreed)
        if turn is not self.roots:
            self._take_turn(turn)

    def after_backward(self, turn: Turn) -> None:
        """Free units, and begin to reduce their gradients."""
        if self._is_in(BACKWARD):
            self._free_after_backward(turn)
            self.running.leave(turn)

    def _begin_backward(self, agreed: Agreed) -> None:
        for unit in self.units:
            unit.drop_cleared()
        wanted = set(itertools.compress(self.units, agreed.flags[-len(self.units) :]))
        for root in self.roots:
            if root in wanted:
                root.gather()
        reduced = [unit for unit in self.units if unit.is_trained] if self.do_sync() and not agreed.again else ()
        order = [*reversed(self.others), self.roots]
        self.running = Pass(BACKWARD, order, wanted.difference(self.roots), reduced, self.prefetch)
        for root in self.roots:
            root.wait()

    def _end_backward(self, forward: Pass | None) -> None:
        """End the last pass, when autograd has computed all gradients."""
        self._end_backward_pass()
        self.running = forward
        if forward is None and self.sync == "backward" and self.do_sync():
            self.sync_gradients()

    def _end_backward_pass(self) -> None:
        self._free_after_backward(self.roots)
        self.running.finish()
        self._free_after_backward(self.units)
        for unit in self.units:
            unit.mark()
        self.running = None

    def _free_after_backward(self, units: list[Unit]) -> None:
        for unit in units:
            unit.free()
            if not self.do_sync():
                unit.keep()

    # Synchronisation

    def sync_gradients(self) -> None:
        """Leave in every rank's shards the mean of all gradients that any rank has. See `FSDP.sync_gradients`."""
        while (agreed := self.meet(SYNC)).begins_backward:  # of other ranks, which this one takes part in
            self._begin_backward(agreed)
            self._end_backward_pass()
        self.running = Pass(SYNC, (), ())  # no steps; a Stop in here is noticed
        flags = iter(agreed.flags)
        unreduced = list(itertools.compress(self.units, flags))  # takes as many flags as there are units
        for unit in self.units:
            unit.drop_cleared()
        for unit in unreduced:
            unit.reduce()
        for step in (Unit.finish_reduce, Unit.reduce_over_copies, Unit.finish_reduce):
            for unit in self.units:  # all of them before the first waits for the model's other copies
                step(unit)
        for unit in self.units:
            unit.hand_out(itertools.islice(flags, len(unit.names)))
        if next(flags):
            broadcast_from_first(self._persistent_buffers().values(), self.group)
        self._buffers = self._persistent_buffers()
        self.running = None

    def before_step(self, parameters: set[torch.Tensor]) -> None:
        """Raise ValueError on every rank if an optimizer would step before their gradients are synchronised."""
        if any(not parameters.isdisjoint(unit.on_their_way) for unit in self.units):
            self.meet(STEP, problem=SYNC_FORGOTTEN)

    def after_step(self) -> None:
        """Note that an optimizer's step has come to its end."""
        self._steps += 1

    def mark_loaded(self) -> None:
        """Note that all ranks have loaded their parameters, whatever happened to them before."""
        self._steps, self._buffers = 0, self._persistent_buffers()

    # In step with the other ranks

    def meet(self, action: str, *details: str, problem: str | None = None, again: bool = False) -> Agreed:
        """Compare with the other ranks what they are about to do. `details`: what of it has to be the same.

        Raises ValueError or RuntimeError on every rank if any rank can't do it, or if they do not go together. If a
        pass was interrupted on any rank, all of them restart, with a warning where no gradients are asked for.
        """
        interruption = None
        if self.running is not None and action not in (BACKWARD, AGAIN):
            what = self.running.kind.split(maxsplit=1)[1]
            interruption = f"{what} did not reach its end; {DROPPED}"
            self._end_interrupted_pass()
        order = "\n".join(turn[0].module_name for turn in self._used)
        said = [action, *details, *self._lines(action)], self._flags(action), order, again
        try:
            agreed = meet(self.group, *said, problem or self._problem(action), interruption)
        except (RuntimeError, ValueError):
            self.restart()
            raise
        if agreed.interruptions:
            self.restart()
            if action in (BACKWARD, SYNC):  # of gradients that are gone
                raise RuntimeError(agreed.interruptions)
            with warnings.catch_warnings():
                warnings.simplefilter("always")  # each time, not only the first
                warnings.warn(agreed.interruptions, stacklevel=3)
        return agreed

    def restart(self) -> None:
        """Free everything and drop all gradients."""
        for unit in self.units:
            unit.abandon()
        self.running, self._used = None, []
        self.restarts += 1

    def rest(self) -> None:
        """Between passes: let the model hold its shards, also those of units that were kept for backward."""
        if self.running is None:
            for unit in self.units:
                unit.free()

    def changes(self) -> int:
        """How many times parameters were changed in place."""
        return self._steps + sum(shard._version for unit in self.units for shard in unit.shards)

    def _is_in(self, *kinds: str) -> bool:
        """Whether such a pass is running. A backward pass that was left by an error is not."""
        if self.running is None or self.running.kind not in kinds:
            return False
        return self.running.kind != BACKWARD or torch._C._current_graph_task_id() != -1

    def _end_interrupted_pass(self) -> None:
        """Do the rest of the pass, for which other ranks may wait, unless a Stop has renewed the group since."""
        if self._renewals == self._renewals_of_group():
            self.running.finish()
            for unit in self.units:
                unit.free()
                unit.finish_reduce()
        self._renewals = self._renewals_of_group()

    def _renewals_of_group(self) -> int:
        return getattr(self.group or dist.group.WORLD, "renewals", 0)

    def _problem(self, action: str) -> str | None:
        """Say what keeps this rank from the action, or return None."""
        if action == BACKWARD and self._changes != self.changes():
            return "the parameters were changed between this forward pass and its backward pass"
        check = Unit.gradient_problem if action in (BACKWARD, SYNC) else Unit.problem
        return next(filter(None, map(check, self.units)), None)

    def _lines(self, action: str) -> list[str]:
        """What has to be the same on every rank before this action."""
        frozen = [name for unit in self.units for name in unit.frozen]
        lines = [
            "gradients are synchronised" if self.do_sync() else "gradients are not synchronised",
            f"frozen: {', '.join(frozen) or 'nothing'}",
        ]
        if action in (FORWARD, EVALUATION, BACKWARD, SYNC):
            lost = "where ranks differ, one was interrupted, and a checkpoint must be loaded"
            lines.append(f"steps of the optimizer: {self._steps} ({lost})")
        if action in (BACKWARD, SYNC):
            cleared = [name for unit in self.units for name in unit.cleared()]
            lines.append(f"gradients cleared since backward: {', '.join(sorted(cleared)) or 'none'}")
        if action == SYNC:
            lines += [f"a buffer of shape {tuple(buffer.shape)}" for buffer in self._persistent_buffers().values()]
        return lines

    def _flags(self, action: str) -> list[bool]:
        """What the ranks tell each other, equally many flags at every call, of which all learn the largest.

        For each unit: it has whole gradients. For each parameter: it had a gradient. One: buffers have changed. For
        each unit: it has to be gathered for backward.
        """
        return [
            *(unit.is_unreduced for unit in self.units),
            *(is_present for unit in self.units for is_present in unit.present()),
            action == SYNC and self._buffers.keys() != self._persistent_buffers().keys(),
            *(unit in self._needed and not unit.is_available for unit in self.units),
        ]

    def _persistent_buffers(self) -> dict[tuple[int, int], torch.Tensor]:
        """The model's persistent buffers by identity and version, which tell whether they have changed."""
        found = {}
        for module in modules_of(self.model):
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    found[id(buffer), 0 if buffer.is_inference() else buffer._version] = buffer
        return found
