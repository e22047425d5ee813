"""What happens before and after each unit's forward and backward, in step with the other ranks.

    forward         gather the root; for each unit: gather, compute, free
    backward        gather the root; for each unit, in reverse order: gather, compute, free, reduce; reduce the root
    sync_gradients  reduce what backward could not, and hand the means to the masters

A pass begins with `Runtime.meet`, where the ranks compare what they are about to do, and with a `Schedule` of its
collectives. Then hooks in the model call the methods of `Runtime`; `install_hooks`, below, says where.
"""

import dataclasses
import enum
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from scratch_ddp.common.agreement import raise_everywhere
from scratch_ddp.common.optimizer_steps import SYNC_FORGOTTEN, parameters_of
from scratch_ddp.fsdp.desync import Action, Agreed, Intent, agree
from scratch_ddp.fsdp.schedule import Schedule
from scratch_ddp.fsdp.units import ShardedModel, SyncWork, Unit

INTERRUPTED = "the last forward or backward pass was interrupted; all gradients since the last step are dropped"


class Phase(enum.Enum):
    """What a rank is doing. If it is not IDLE when a pass begins, it was interrupted."""

    IDLE = enum.auto()
    FORWARD = enum.auto()
    BACKWARD = enum.auto()
    SYNC = enum.auto()


class Runtime:
    """Leads the units of a model through its passes.

    In a forward or backward pass each unit has one turn: it is gathered, computes and is freed. If a unit computes more
    than once before its backward (two forward passes, or one that calls it twice), it also has that many turns in
    backward. Its gradients are then reduced by `sync_gradients`, not during backward.

    `prefetch`: how many units ahead of their turn are gathered. `free_after_forward`: False keeps units for backward.
    `sync`: "backward" if gradients are synchronised when a backward ends.
    `do_sync()`: whether gradients are synchronised at the moment.
    """

    def __init__(
        self, model: ShardedModel, prefetch: int, free_after_forward: bool, sync: str, do_sync: Callable[[], bool]
    ):
        self.model, self.prefetch, self.free_after_forward = model, prefetch, free_after_forward
        self.sync, self.do_sync = sync, do_sync
        self.root, *self.units = model.units  # the others in the order of their first use, as far as it is known
        self.phase = Phase.IDLE
        self.schedule = Schedule([])
        self.restarts = 0  # after interruptions; backward through a graph from before one is refused
        self._used: list[Unit] = []  # the units of the last forward pass, in the order of their first turn
        self._turns = 0  # how often a unit may come up in the next backward
        self._several_turns = False  # more than one, on any rank
        self._changes = 0  # of the masters, before the last forward pass

    # Forward

    def begin_forward(self) -> None:
        """Gather the root, and begin to gather the first units: all anew, since the masters may have changed."""
        if self.phase is Phase.BACKWARD:  # the whole model is recomputed, for activation checkpointing
            return
        self.model.adopt_changes()
        self.meet(Action.FORWARD if torch.is_grad_enabled() else Action.EVALUATION)
        self.model.replicated.collect()
        self.model.replicated.refresh()
        for unit in self.model.units:
            unit.free()
        self.phase, self._used = Phase.FORWARD, []
        self._turns += torch.is_grad_enabled()
        self._changes = self.model.changes()
        order = [self.root, *self.units]
        self.schedule = Schedule(order, gathered=order, prefetch=self.prefetch)
        self.schedule.before(self.root)
        self.root.wait_for_gather()

    def before_forward(self, unit: Unit) -> None:
        """Gather the unit, and begin to gather the next ones."""
        if self.phase is Phase.FORWARD:
            self.schedule.before(unit)
            self._gather_again(unit)
            if unit not in self._used:
                self._used.append(unit)
        elif self.phase is Phase.BACKWARD:  # it is recomputed, for activation checkpointing
            self._take_turn(unit, self.schedule.gather)
        else:  # it is called by itself
            self.meet(Action.UNIT_ALONE)
            self._turns += 1
            self._changes = self.model.changes()
        unit.wait_for_gather()

    def after_forward(self, unit: Unit) -> None:
        """Free the unit. Where it was recomputed in backward, its backward follows at once."""
        if self.phase is not Phase.BACKWARD and not self._keeps(unit):
            unit.free()

    def end_forward(self) -> None:
        """Gather what only other ranks have used, and free all that is not kept for backward."""
        if self.phase is not Phase.FORWARD:
            return
        self.schedule.finish()
        for unit in self.model.units:
            unit.wait_for_gather() if self._keeps(unit) else unit.free()
        self.phase = Phase.IDLE

    def _keeps(self, unit: Unit) -> bool:
        """True if the unit stays gathered until the backward pass."""
        if self.phase is not Phase.FORWARD or not torch.is_grad_enabled():
            return False
        return not self.free_after_forward or unit is self.root or unit is self.units[-1]

    def _gather_again(self, unit: Unit) -> None:
        """Gather a unit whose turn in this forward pass is over. All ranks must, or none, so they compare."""
        if unit.needs_gather:
            self.schedule.finish()  # or a rank whose turn it is not might still be gathering others
            self.meet(Action.UNIT_AGAIN)
            self._turns += 1  # it will have as many turns in backward
            unit.gather()

    # Backward

    def before_backward(self, unit: Unit, restarts: int) -> None:
        """Gather the unit again; the first call begins a backward pass. `restarts`: at the time of the forward pass."""
        if restarts != self.restarts:
            raise RuntimeError(f"this loss is from before an interruption ({INTERRUPTED}): run the forward pass again")
        if self.phase is Phase.FORWARD:  # torch.autograd.grad inside the model's forward
            self._gather_again(unit)
        elif self.phase is not Phase.BACKWARD:
            self.meet(Action.BACKWARD)
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            self._begin_backward()
        if self.phase is Phase.BACKWARD and unit is not self.root:
            self._take_turn(unit, self.schedule.before)
        unit.wait_for_gather()

    def after_backward(self, unit: Unit) -> None:
        """Free the unit, and begin to reduce its gradients."""
        if self.phase is Phase.BACKWARD:
            unit.free()
            self.schedule.after(unit)
            if not self.do_sync():
                unit.keep_gradients()

    def _begin_backward(self) -> None:
        self.phase = Phase.BACKWARD
        self.model.drop_cleared()
        self.root.gather()
        order = [*reversed(self.units), self.root]
        gathered = [unit for unit in order if not unit.is_gathered and unit is not self.root]
        reduced = order if self.do_sync() and not self._several_turns else ()
        self.schedule = Schedule(order, gathered, reduced, self.prefetch)
        self.schedule.start()
        self.root.wait_for_gather()

    def _take_turn(self, unit: Unit, advance: Callable[[Unit], None]) -> None:
        """Gather the unit by advancing in the schedule. If its turn is over, this one belongs to another pass."""
        advance(unit)
        if unit.needs_gather:
            self._end_pass()
            self.meet(Action.BACKWARD)
            self._begin_backward()
            self.schedule.before(unit)

    def _end_backward(self) -> None:
        """End the last pass, when autograd has computed all gradients."""
        self._end_pass()
        self._turns = 0
        if self.sync == "backward" and self.do_sync():
            self.sync_gradients()

    def _end_pass(self) -> None:
        self.root.free()
        self.schedule.finish()
        for unit in self.model.units:
            unit.free()
            if not self.do_sync():
                unit.keep_gradients()
            unit.mark_pending()
        self.model.replicated.mark_pending()
        self.phase = Phase.IDLE

    # Synchronisation

    def sync_gradients(self) -> None:
        """Leave in every rank's masters the mean of all gradients that any rank has. See `FSDP.sync_gradients`."""
        self.model.replicated.collect()
        work = self._wait_for_backward_passes()
        self.phase = Phase.SYNC
        for gradients in work.unreduced:
            gradients.reduce()
        for gradients in self.model.gradients:
            gradients.wait_for_reduce()  # all of them before the first waits for the model's other copies
        for gradients in self.model.gradients:
            gradients.accumulate(work.present)
        self.model.replicated.reduce(work.present)
        self.model.buffers.copy_from_first(work.changed_buffers)
        self.phase = Phase.IDLE

    def _wait_for_backward_passes(self) -> SyncWork:
        """Wait until all ranks synchronise, and take part in backward passes that only other ranks have."""
        while True:
            agreed = self.meet(Action.SYNC)
            self.model.drop_cleared()
            if agreed.action is Action.SYNC:
                return self.model.read_flags(agreed.flags)
            self._begin_backward()
            self._end_pass()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise on every rank, and drop all gradients, if the optimizer would step before they are synchronised."""
        if not parameters_of(optimizer).isdisjoint(self.model.pending().values()):
            self.meet(Action.STEP)

    # In step with the other ranks

    def meet(self, action: Action, *details: str) -> Agreed:
        """Compare with the other ranks what they are about to do. `details`: what of it has to be the same.

        Raises ValueError or RuntimeError on every rank if any rank can't do it, or if they do not go together. If any
        rank was interrupted before, all of them restart.
        """
        problem = self._problem(action)
        intent = Intent(
            action=action,
            details=[*details, *self._details(action)],
            order=[unit.name for unit in self._used],
            turns=self._turns,
            has_problem=problem is not None,
            was_interrupted=self.phase is not Phase.IDLE and action is not Action.UNIT_AGAIN,
            flags=self.model.flags() if action is Action.SYNC and not problem else [0] * self.model.flag_count,
        )
        agreed = agree(intent, self.model.group)
        self._several_turns = agreed.turns > 1
        if agreed.has_problem:
            self.restart()
            raise_everywhere(problem, self.model.group)
        if agreed.was_interrupted:
            self.restart()
            self._tell_of_interruption(action)
        if agreed.same_order and action in (Action.FORWARD, Action.EVALUATION):
            self.units = [*self._used, *(unit for unit in self.units if unit not in self._used)]
        return agreed

    def _problem(self, action: Action) -> str | None:
        problem = SYNC_FORGOTTEN if action is Action.STEP else self.model.problem()
        if problem is None and action is Action.BACKWARD and self._changes != self.model.changes():
            return "the parameters were changed between this forward pass and its backward pass"
        return problem

    def _details(self, action: Action) -> list[str]:
        """What has to be the same on every rank before this action."""
        details = [f"frozen: {', '.join(self.model.frozen()) or 'nothing'}"]
        if action is not Action.METHOD:
            details.append("gradients are synchronised" if self.do_sync() else "gradients are not synchronised")
            details.append(
                f"parameters changed in place {self.model.changes_since_load()} times (where ranks differ, a step of "
                "the optimizer was interrupted, and a checkpoint must be loaded)"
            )
        if action in (Action.BACKWARD, Action.SYNC):  # a backward pass gathers the other units
            details += [unit.name for unit in self.model.units if unit.is_gathered]
            details.append(f"gradients cleared since backward: {', '.join(self.model.cleared()) or 'none'}")
        return details

    def _tell_of_interruption(self, action: Action) -> None:
        if action in (Action.BACKWARD, Action.SYNC):  # of gradients that are gone
            raise RuntimeError(INTERRUPTED)
        with warnings.catch_warnings():
            warnings.simplefilter("always")  # each time, not only the first
            warnings.warn(INTERRUPTED, stacklevel=3)

    def restart(self) -> None:
        """Free everything and drop all gradients."""
        for unit in self.model.units:
            unit.abandon()
        self.model.replicated.drop()
        self.phase, self._used, self._turns = Phase.IDLE, [], 0
        self.restarts += 1


def install_hooks(runtime: Runtime, compute_dtype: torch.dtype | None) -> list[RemovableHandle]:
    """Let the model call the runtime; return the handles that remove the hooks again.

        the root's module    begin_forward, end_forward
        a unit's module      before_forward, after_forward
        outputs of either    before_backward, once the gradient of one of them is known
        a unit's inputs      after_backward, once the gradients of all of them are known
        a parameter          schedule.free_reduced, once its gradient is known

    A unit none of whose inputs needs a gradient is done only when the whole backward pass is over. Outputs are found in
    tuples, lists, mappings and dataclasses, however nested. torch.compile leaves the hooks out of its graphs.
    """
    handles = []
    uncompiled = functools.partial(torch.compiler.disable, reason="FSDP gathers and frees parameters here")
    for unit in runtime.model.units:
        before = uncompiled(functools.partial(_before_forward, runtime, unit, compute_dtype))
        after = uncompiled(functools.partial(_after_forward, runtime, unit))
        handles.append(unit.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        # After an exception in the model, the root's forward is ended as well: other ranks may have had none.
        handles.append(unit.module.register_forward_hook(after, always_call=unit is runtime.root))
        for parameter in filter(lambda each: each.requires_grad, unit.parameters()):
            handles.append(parameter.register_post_accumulate_grad_hook(lambda _: runtime.schedule.free_reduced()))
    return handles


def _before_forward(
    runtime: Runtime, unit: Unit, compute_dtype: torch.dtype | None, module: nn.Module, args: tuple, kwargs: dict
) -> tuple[tuple, dict]:
    if unit is runtime.root:
        runtime.begin_forward()
    else:
        runtime.before_forward(unit)
    if compute_dtype is not None:
        args, kwargs = _map_tensors((args, kwargs), functools.partial(_cast, dtype=compute_dtype))
    if unit is not runtime.root and torch.is_grad_enabled():
        args, kwargs = _watch_inputs(args, kwargs, lambda _: runtime.after_backward(unit))
    return args, kwargs


def _after_forward(runtime: Runtime, unit: Unit, module: nn.Module, args: tuple, output: Any) -> None:
    restarts = runtime.restarts
    for tensor in _tensors(output):
        if tensor.requires_grad:
            tensor.register_hook(lambda _: runtime.before_backward(unit, restarts))
    if unit is runtime.root:
        runtime.end_forward()
    else:
        runtime.after_forward(unit)


def _watch_inputs(args: tuple, kwargs: dict, after: Callable[[Any], None]) -> tuple[tuple, dict]:
    """Return the inputs, and have `after` called in backward once the gradients of all of them are known.

    The unit gets views: of a tensor that other units use too, only this unit's part of the gradient is waited for.
    """
    watched: list[torch.Tensor] = []

    def watch(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        watched.append(tensor.view_as(tensor))
        return watched[-1]

    args, kwargs = _map_tensors((args, kwargs), watch)
    if watched:
        register_multi_grad_hook(watched, after)
    return args, kwargs


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the same nest of tuples, lists and dicts, its tensors changed.

    Other objects remain the same: a cache that the model writes to must stay the caller's own.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_map_tensors(each, change) for each in value)
    if type(value) is dict:
        return {key: _map_tensors(each, change) for key, each in value.items()}
    return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in a nest of tuples, lists, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif dataclasses.is_dataclass(value):
        yield from _tensors([getattr(value, field.name) for field in dataclasses.fields(value)])
