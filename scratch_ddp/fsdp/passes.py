"""What happens before and after each module's forward and backward, in step with the other ranks.

Hooks in the model call the methods of `Runtime`. A pass begins where the ranks meet; its `Schedule` then says in which
order it gathers and reduces.
"""

import functools
import itertools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from scratch_ddp.common.agreement import Compared, check_everywhere, compare, digest, raise_everywhere, said_by_ranks
from scratch_ddp.common.replicas import OTHER_BUFFERS, broadcast_from_first, modules_of, persistent_buffers
from scratch_ddp.fsdp.nests import Changes, Node, base_of, nodes_of, with_tensors, write_back
from scratch_ddp.fsdp.schedule import Schedule, Turn
from scratch_ddp.fsdp.unit import ROOT, Unit

FORWARD, EVALUATION = "begins a forward pass", "begins a forward pass under no_grad"
BACKWARD, SYNC = "begins a backward pass", "calls sync_gradients()"
BACKWARD_OR_SYNC = f"{BACKWARD}, or {SYNC}"  # a rank whose loss does not depend on the model has no backward pass
SECOND_DERIVATIVES = (
    "second derivatives (create_graph=True) need parameters that are freed by then: an FSDP has first derivatives only"
)
OUT_OF_STEP = "the ranks are out of step: every rank must do the same in the same order"
CALLED_ALONE = "a unit is called by itself: call the whole model, or make that module the FSDP"
DROPPED = "all gradients since the last step are dropped"
log = logging.getLogger(__name__)


class Runtime:
    """Leads the units of a model through its passes.

    In a pass each unit has one turn: it is gathered, computes and is freed. A unit that is needed after its turn, or
    was not expected to have one, makes all ranks meet and begin another pass. Only a backward's first pass reduces;
    `sync_gradients` does the rest.

    `do_sync()`: whether gradients are synchronised at the moment. The other settings are those of `FSDP`.
    """

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        group: dist.ProcessGroup | None,
        do_sync: Callable[[], bool],
        compute_dtype: torch.dtype | None,
        free_after_forward: bool,
        prefetch: int,
    ):
        self.model, self.units, self.group, self.compute_dtype = model, units, group, compute_dtype
        self.prefetch, self.free_after_forward, self.do_sync = prefetch, free_after_forward, do_sync
        self.running: Schedule | None = None
        self.restarts = 0  # after errors, and when parameters are loaded
        self.steps = 0  # of optimizers, that have come to their end since parameters were loaded
        self._used: list[Turn] = []  # in the last forward pass, in the order of their first turn
        self._given: dict[nn.Module, tuple[Changes, set[Node]]] = {}  # to modules whose forward runs
        self._renewals = 0  # of the group, after a Stop in a rank cell
        self._backward = lambda: None  # a reference that is dead unless a backward pass is running
        self._pieces = [each for unit in units for each in unit.pieces]
        self._wholes = {id(each.whole) for each in self._pieces}
        turns: dict[str, Turn] = {ROOT: []}  # by the name of the module
        for unit in units:
            turns.setdefault(unit.module_name, []).append(unit)
        self.roots, *self.others = turns.values()  # the others as the last forward pass used them
        self._needed = set(self.roots)  # those whose backward the last forward pass has made ready
        for name, turn in turns.items():
            before, after = functools.partial(self._before, turn), functools.partial(self._after, turn)
            module = model.get_submodule(name)
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            # After an exception in the model, its forward is ended as well: other ranks may have had none.
            module.register_forward_hook(after, with_kwargs=True, always_call=name == ROOT)
        for module in model.modules():
            module.register_state_dict_pre_hook(lambda *_: self.rest())
            module.register_load_state_dict_pre_hook(lambda *_: self.rest())
        model.register_load_state_dict_pre_hook(lambda *_: self.mark_loaded())

    # Hooks: of a module of units or the whole model, and on the gradients of its outputs and inputs.
    # torch.compile leaves them out of its graphs.

    @torch.compiler.disable(reason="FSDP gathers parameters here")
    def _before(self, turn: Turn, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        self._begin_forward() if turn is self.roots else self._before_forward(turn)
        watched: list[torch.Tensor] = []

        def prepare(tensor: torch.Tensor) -> torch.Tensor:
            if self.compute_dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(self.compute_dtype)
            if turn is self.roots or not (tensor.requires_grad and torch.is_grad_enabled()):
                return tensor
            # A view: of a tensor that other modules use too, only this one's part of the gradient is waited for.
            watched.append(tensor.view_as(tensor))
            return watched[-1]

        changes: Changes = []
        args, kwargs = with_tensors(prepare, (args, kwargs), changes)
        if watched:  # a module none of whose inputs needs a gradient is done only when the whole backward pass is over
            register_multi_grad_hook(watched, lambda _: self._after_backward(turn))
        self._given[module] = changes, _nodes_at(module, args, kwargs)
        return args, kwargs

    @torch.compiler.disable(reason="FSDP frees parameters here")
    def _after(self, turn: Turn, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        made, (changes, given) = (self.restarts, self.steps), self._given.pop(module, ([], set()))
        write_back(changes)

        def outlive(tensor: torch.Tensor) -> torch.Tensor:
            """A copy of a parameter or of a view of one, which is freed soon."""
            return tensor.clone() if id(base_of(tensor)) in self._wholes else tensor

        output = with_tensors(outlive, output, [])
        nodes = nodes_of(output)  # under no_grad too, where a model may switch gradients on
        if nodes and not torch.is_grad_enabled():
            given = nodes_of((args, kwargs))
        nodes = (nodes | _nodes_at(module, args, kwargs)) - given
        for node in nodes:
            node.register_prehook(lambda _: self._before_backward(turn, made))
        self._end_forward() if turn is self.roots else self._after_forward(turn, bool(nodes))
        return output

    # Forward

    def _begin_forward(self) -> None:
        """Gather the root, and begin to gather the first units: all anew, since parameters may have changed."""
        if self._is_in(BACKWARD):  # the whole model is recomputed, for activation checkpointing
            return
        kind = FORWARD if torch.is_grad_enabled() else EVALUATION
        agreed = self.meet(kind)
        for unit in self.units:
            unit.free()
        if "order" not in agreed.different:
            self.others = [*self._used, *(turn for turn in self.others if turn not in self._used)]
        self._used = []
        if kind == FORWARD:
            self._needed = set(self.roots)
        self.running = Schedule(kind, [self.roots, *self.others], self.units, prefetch=self.prefetch)
        self._take_turn(self.roots)

    def _before_forward(self, turn: Turn) -> None:
        """Gather the units of a module, and begin to gather the next ones."""
        if not self._is_in(FORWARD, EVALUATION, BACKWARD):
            self.meet("calls a unit outside of the model's forward", problem=CALLED_ALONE)
        if not self._is_in(BACKWARD) and turn not in self._used:
            self._used.append(turn)
        self._take_turn(turn)

    def _after_forward(self, turn: Turn, has_backward: bool) -> None:
        """Free the units. Where they were recomputed in backward, their backward follows at once."""
        if self._is_in(FORWARD):
            if not has_backward and not torch.is_grad_enabled():  # reentrant checkpointing will compute it again
                has_backward = any(unit.is_trained for unit in turn)
            self._needed.update(turn if has_backward else ())
        if not self._is_in(BACKWARD):
            self._free_after_forward(turn)

    def _end_forward(self) -> None:
        """Gather what only other ranks have used, and free all that is not kept for backward."""
        self._given.clear()  # after an error, those of units too
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
                self.meet(f"calls {turn[0].module_name!r} again in the same forward pass", again=True)
                self.running = Schedule(self.running.kind, [turn], turn)
            self.running.reach(turn)
        for unit in turn:
            unit.wait()

    # Backward

    def _before_backward(self, turn: Turn, made: tuple[int, int]) -> None:
        """Gather units again; the first call begins a backward pass. `made`: when the forward pass was."""
        if made != (self.restarts, self.steps):
            said = "an error (which drops gradients), a load, or a step of the optimizer"
            raise RuntimeError(f"this loss is from before {said}: run the forward pass again")
        if not self._is_in(BACKWARD):
            agreed = self.meet(BACKWARD, problem=SECOND_DERIVATIVES if torch.is_grad_enabled() else None)
            end = functools.partial(self._end_backward)
            torch.autograd.Variable._execution_engine.queue_callback(end)
            self._backward, end = weakref.ref(end), None  # autograd alone keeps it, while this backward pass runs
            self._begin_backward(agreed)
        if turn is not self.roots:
            self._take_turn(turn)

    def _after_backward(self, turn: Turn) -> None:
        """Free units, and begin to reduce their gradients."""
        if self._is_in(BACKWARD):
            self._free_after_backward(turn)
            self.running.leave(turn)

    def _begin_backward(self, agreed: Compared) -> None:
        for unit in self.units:
            unit.drop_cleared()
        wanted = set(itertools.compress(self.units, agreed.flags[-len(self.units) :]))
        for root in self.roots:
            if root in wanted:
                root.gather()
        reduces = self.do_sync() and not agreed.largest["again"]
        to_reduce = [unit for unit in self.units if unit.is_trained and reduces]
        order = [*reversed(self.others), self.roots]
        self.running = Schedule(BACKWARD, order, wanted.difference(self.roots), to_reduce, self.prefetch)
        for root in self.roots:
            root.wait()

    def _end_backward(self) -> None:
        """All gradients are computed."""
        self._free_after_backward(self.roots)
        self.running.finish()
        self._free_after_backward(self.units)
        for unit in self.units:
            unit.mark()
        self.running = None

    def _free_after_backward(self, units: list[Unit]) -> None:
        self._given.clear()  # to units that were recomputed only as far as it was needed
        for unit in units:
            unit.free()
            unit.take_gradients()

    # Synchronisation

    def sync_gradients(self) -> None:
        """Leave in every rank's shards the mean of all gradients that any rank has. See `FSDP.sync_gradients`."""
        for unit in self.units:  # of a backward pass that did not come through a unit's outputs
            unit.take_gradients()
        while (agreed := self.meet(SYNC)).largest["backward"]:  # of other ranks, which this one takes part in
            self._begin_backward(agreed)
            self._end_backward()
        if "buffers" in agreed.different:
            check_everywhere([*persistent_buffers(self.model)], OTHER_BUFFERS, self.group)
        flags = iter(agreed.flags)
        unreduced = list(itertools.compress(self.units, flags))  # takes as many flags as there are units
        steps = itertools.product((Unit.finish_reduce, Unit.reduce_over_copies, Unit.finish_reduce), self.units)
        then = [functools.partial(step, unit) for step, unit in steps]  # all start before the first waits for copies
        then.append(lambda: broadcast_from_first(persistent_buffers(self.model).values(), self.group))
        self.running = Schedule(SYNC, [unreduced], to_reduce=unreduced, then=then)
        for unit in self.units:
            unit.drop_cleared()
        self.running.finish()
        for unit in self.units:
            unit.hand_out(itertools.islice(flags, len(unit.pieces)))
        self.running = None

    def count_step(self) -> None:
        """An optimizer's step has come to its end."""
        self.steps += 1

    def mark_loaded(self) -> None:
        """All ranks load their parameters, whatever happened to them before."""
        self.steps, self.restarts = 0, self.restarts + 1

    # In step with the other ranks

    def meet(self, action: str, problem: str | None = None, again: bool = False) -> Compared:
        """Compare with the other ranks what they are about to do. `problem`: why this rank can't do it.

        A backward pass goes together with `sync_gradients()`: a rank whose loss does not depend on the model takes part
        in the others' pass when it synchronises.
        Raises ValueError or RuntimeError on every rank if any rank can't do it, or if they do not go together. If a
        pass was interrupted on any rank, all of them restart, with a warning where no gradients are asked for.
        Costs one all-reduce of 80 bytes, 8 per parameter and 16 per unit.
        """
        interruption = None
        if self.running is not None and not again:
            interruption = f"{self.running.kind.split(maxsplit=1)[1]} did not reach its end; {DROPPED}"
            if not self._is_cut_off():  # other ranks may wait for the rest
                self.running.finish()
                for unit in self.units:
                    unit.free()
                    unit.finish_reduce()
        self._renewals = getattr(self.group or dist.group.WORLD, "renewals", 0)
        lines = [BACKWARD_OR_SYNC if action in (BACKWARD, SYNC) else action, *self._lines(action)]
        same = {"lines": digest(lines), "order": digest([turn[0].module_name for turn in self._used])}
        same["buffers"] = digest([*persistent_buffers(self.model)] if action == SYNC else [])
        if problem is None and action not in (BACKWARD, SYNC):
            problem = next(filter(None, map(Unit.problem, self.units)), None)
        told = {"problem": problem is not None, "interruption": interruption is not None}
        agreed = compare(self.group, same, told | {"backward": action == BACKWARD, "again": again}, self._flags())
        try:
            if agreed.largest["problem"]:
                raise_everywhere(problem, self.group)
            if agreed.largest["interruption"]:
                interruption = "\n".join(said_by_ranks(interruption or "", self.group))
                if "lines" in agreed.different or action in (BACKWARD, SYNC):  # of gradients that are gone
                    raise RuntimeError(interruption)
                self.restart()
                log.warning(interruption)
            if "lines" in agreed.different:
                check_everywhere(lines, OUT_OF_STEP, self.group)
        except (RuntimeError, ValueError):
            self.restart()
            raise
        return agreed

    def restart(self) -> None:
        """Free everything and drop all gradients."""
        for unit in self.units:
            unit.abandon()
        self.running, self._used = None, []
        self.restarts += 1

    def rest(self) -> None:
        """Between passes: let the model hold its shards, also those of units kept for backward, or left by an error."""
        if not self._is_in(FORWARD, EVALUATION, BACKWARD):
            for unit in self.units:
                unit.show_shards()

    def _is_in(self, *kinds: str) -> bool:
        """Whether such a pass is running. One that was left by an error or a Stop is not."""
        if self.running is None or self.running.kind not in kinds or self._is_cut_off():
            return False
        return self.running.kind != BACKWARD or self._backward() is not None

    def _is_cut_off(self) -> bool:
        """Whether a Stop in a rank cell has cut off the messages that are under way."""
        return getattr(self.group or dist.group.WORLD, "renewals", self._renewals) != self._renewals

    def _lines(self, action: str) -> list[str]:
        """What has to be the same on every rank before this action."""
        frozen = ", ".join(each.name for each in self._pieces if not each.shard.requires_grad)
        lines = [f"gradients are {'' if self.do_sync() else 'not '}synchronised", f"frozen: {frozen or 'nothing'}"]
        if action in (FORWARD, EVALUATION, BACKWARD, SYNC):
            lost = "where ranks differ, one was interrupted, and a checkpoint must be loaded"
            lines.append(f"steps of the optimizer: {self.steps} ({lost})")
        if action in (BACKWARD, SYNC):
            cleared = ", ".join(each.name for each in self._pieces if each.is_cleared)
            lines.append(f"gradients cleared since backward: {cleared or 'none'}")
        return lines

    def _flags(self) -> list[bool]:
        """For each unit: it has whole gradients; each parameter: had one; each unit: is gathered for backward."""
        return [
            *(any(each.gradient is not None and not each.is_cleared for each in unit.pieces) for unit in self.units),
            *(each.has_gradient and not each.is_cleared for each in self._pieces),
            *(unit in self._needed and not unit.is_available for unit in self.units),
        ]


def _nodes_at(module: nn.Module, args: tuple, kwargs: dict) -> set[Node]:
    """Where autograd comes to what a module was given, as a cache, or keeps in itself, as a loss; if it is wanted."""
    if not torch.is_grad_enabled():
        return set()
    kept = [each for part in modules_of(module) for each in vars(part).values() if isinstance(each, torch.Tensor)]
    return nodes_of((args, kwargs, kept))
