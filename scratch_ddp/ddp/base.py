"""The protocol that every data-parallel strategy follows, and what makes it hold for real models.

    model = Strategy(model)
    for i, batch in enumerate(batches):
        last = (i + 1) % n == 0 or i + 1 == len(batches)
        with contextlib.nullcontext() if last else model.no_sync():
            (model(batch) / n).backward()
            model.sync_gradients()
        if last:
            optimizer.step()
            optimizer.zero_grad()

A strategy inherits from `ReplicatedModule`, verifies or copies the replicas' values in its constructor, and implements
`sync_gradients`. One that reduces after backward reads `do_sync` there. One that reduces from gradient hooks reads it
when a gradient arrives, sets `takes_gradients`, and waits in `sync_gradients` (see `reducer`).
"""

import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.common.agreement import check_same_lines, compare, raise_everywhere, said_by_ranks
from scratch_ddp.common.optimizer_steps import REDUCED, SYNC_FORGOTTEN, parameters_of, watch_steps
from scratch_ddp.common.replicas import (
    Buffers,
    RegisteredParameters,
    broadcast_from_first,
    complete_gradient,
    describe,
    gradient_problem,
    model_problem,
)
from scratch_ddp.common.wrapper import Group, SyncSwitch, nesting_problem, process_group

_wrappers: "weakref.WeakSet[ReplicatedModule]" = weakref.WeakSet()  # all that are alive


class ReplicatedModule(SyncSwitch, nn.Module):
    """A model of which every rank of `group` holds a replica. The base of the strategies, not a strategy itself.

    `group` is a process group, a dimension of a mesh (`mesh["dp"]`), or None for the default group. The newest wrapper
    of a model is the one that works from hooks: those of older wrappers are removed. A model with no parameters, or
    with none to train, can be wrapped too: its buffers are kept equal, and no gradient travels.
    A strategy passes its `settings` as text, and the `problem` that it has with them, if any. Raises ValueError on
    every rank if any rank has a problem, or if the ranks' models differ in names, shapes or dtypes, or are wrapped
    differently. Costs three small all-reduces.

    An optimizer that steps with gradients that were not synchronised raises ValueError, on every rank, unless
    synchronisation is switched off at that moment.
    """

    takes_gradients = False  # True for a strategy that takes gradients away when they arrive

    def __init__(
        self,
        model: nn.Module,
        group: Group = None,
        *,
        settings: str = "",
        problem: str | None = None,
    ):
        super().__init__()
        self.group = process_group(group)
        raise_everywhere(problem or model_problem(model, self.group) or nesting_problem(model), self.group)
        strategy = f"{type(self).__name__}({settings})"
        check_same_lines([strategy], "the ranks wrap their models differently; do the same everywhere", self.group)
        complaint = "the ranks wrap different models; build the same one everywhere"
        check_same_lines(describe(model), complaint, self.group)
        self.module = model
        self.hook_handles: list[torch.utils.hooks.RemovableHandle] = []
        self._wrapped = [
            WrappedParameter(name, each, each.dtype, each.shape, each.device) for name, each in model.named_parameters()
        ]
        self._registered, self._model_buffers = RegisteredParameters(model), Buffers(model, self.group)
        self._unsynchronised = False  # a gradient has arrived since the last `sync_gradients()`
        self._failed_forward = ""  # what a forward pass has raised since then
        for other in self._others_with_hooks():
            other.remove_hooks()
        self._install_hooks()

    def _install_hooks(self) -> None:
        """Have `gradient_arrived` called with each parameter whose gradient is complete, and `before_step`."""
        for _, parameter, *_ in self._wrapped:
            if parameter.requires_grad:
                self.hook_handles.append(parameter.register_post_accumulate_grad_hook(_hook_of(self)))
        weakref.finalize(self, _remove, self.hook_handles)
        _wrappers.add(self)
        watch_steps(self)

    @property
    def world_size(self) -> int:
        """How many ranks hold a replica."""
        return dist.get_world_size(self.group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped model. No communication."""
        try:
            return self.module(*args, **kwargs)
        except Exception as error:
            self._failed_forward = f"{type(error).__name__}: {error}" if torch.is_grad_enabled() else ""
            raise

    def sync_gradients(self) -> None:
        """Replace each gradient by its mean over the ranks, unless synchronisation is switched off."""
        raise NotImplementedError(f"{type(self).__name__} does not implement sync_gradients()")

    def gradient_arrived(self, parameter: nn.Parameter) -> None:
        """Note that autograd has just completed a gradient."""
        self._unsynchronised = True

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError on every rank if the optimizer would step with gradients that were not synchronised."""
        if self._unsynchronised and self.do_sync:
            held = parameters_of(optimizer)
            local = (each.grad for _, each, *_ in self._wrapped if each in held and each.grad is not None)
            if any(not hasattr(gradient, REDUCED) and gradient.any() for gradient in local):  # not cleared since
                self.exchange_presence([0] * len(self._wrapped), SYNC_FORGOTTEN)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy: everything but hooks, and no process group, which exists in this process only."""
        if self.group is not None:
            name = type(self).__name__
            raise RuntimeError(
                f"a {name} with a group of its own can't be pickled or copied: save module.state_dict(), and where it "
                f"is loaded build {name}(model, group=…) again"
            )
        return self.__dict__ | {"hook_handles": [], "_unsynchronised": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Work from hooks again, in the default group. No communication."""
        super().__setstate__(state)
        self._install_hooks()

    def remove_hooks(self) -> None:
        """Remove this strategy's hooks from the model's parameters; the model is then an ordinary module again."""
        _remove(self.hook_handles)
        self._unsynchronised = False

    def copy_from_first(self) -> None:
        """Give every rank the first rank's parameters and buffers. Costs one broadcast per dtype."""
        broadcast_from_first([*self.module.parameters(), *self.module.buffers()], self.group)
        self._model_buffers.remember()

    def parameters_with_gradient(self) -> list[nn.Parameter]:
        """Return the parameters that have a gradient on any rank: the same list in the same order on every rank.

        Where this rank has no gradient, it gets zeros. Parameters without elements are left out. Communicates and
        raises as `exchange_presence` does.
        """
        mine = [int(parameter.requires_grad and parameter.grad is not None) for _, parameter, *_ in self._wrapped]
        anywhere = self.exchange_presence(mine, self._problem())
        present = [each.parameter for each, somewhere in zip(self._wrapped, anywhere, strict=True) if somewhere]
        for parameter in present:
            complete_gradient(parameter)
        return [parameter for parameter in present if parameter.numel()]

    def exchange_presence(self, presence: list[int], problem: str | None, abandoned: bool = False) -> list[int]:
        """Exchange which gradients each rank has; return the largest number of any rank for each parameter.

        `presence` has a number from 0 (no gradient) to 255 for each parameter of the model. Buffers that changed on any
        rank (BatchNorm's statistics) take the first rank's values, as in torch's DDP. Raises ValueError on every rank
        if any rank has a `problem`, unless all ranks have `abandoned` the step.

        If a forward pass has failed on a rank, and the rank has gone on, all ranks warn of it.

        Costs one all-reduce of a byte per parameter and buffer, and one broadcast per dtype of the buffers that
        changed. The answer is read on the processor. Over NCCL, which carries one message after the other, the
        processor therefore waits for all messages under way, and starts no more work on the GPU meanwhile.
        """
        changed = [False] * self._model_buffers.count if problem else self._model_buffers.changed()
        votes = {"refused": problem is not None, "going on": not abandoned, "failed": bool(self._failed_forward)}
        found = compare(self.group, {}, votes, flags=[*presence, *changed], dtype=torch.uint8)
        if found.largest["refused"] and found.largest["going on"]:
            raise_everywhere(problem, self.group)
        if found.largest["failed"]:
            self._tell_of_failed_forward()
        self._model_buffers.copy_from_first(found.flags[len(presence) :])
        self._unsynchronised = False
        return found.flags[: len(presence)]

    def _tell_of_failed_forward(self) -> None:
        said, self._failed_forward = said_by_ranks(self._failed_forward, self.group), ""
        with warnings.catch_warnings():
            warnings.simplefilter("always")  # each time, not only the first
            warnings.warn(
                f"a forward pass failed since the last synchronisation ({'; '.join(said)}). If that batch was left "
                "out there and not elsewhere, the others will wait for that rank at the end: leave it out everywhere",
                stacklevel=4,
            )

    def _problem(self) -> str | None:
        """Say what keeps this rank from averaging its gradients, or return None."""
        if problem := self._registered.problem():
            return problem
        for other in self._others_with_hooks():
            return f"the model was wrapped again in {type(other).__name__}, whose hooks take its gradients: use that"
        return self._model_buffers.problem() or next(filter(None, (each.problem() for each in self._wrapped)), None)

    def _others_with_hooks(self) -> list["ReplicatedModule"]:
        """Other wrappers that have hooks on any of this model's parameters."""
        others = [each for each in _wrappers if each is not self and each.takes_gradients and each.hook_handles]
        mine = {each.parameter for each in self._wrapped} if others else set()
        return [each for each in others if not mine.isdisjoint(each.module.parameters())]


def _hook_of(wrapper: ReplicatedModule) -> Callable[[nn.Parameter], None]:
    """A parameter's hook. It neither keeps the wrapper alive nor calls one that is gone."""
    reference = weakref.ref(wrapper)

    def hook(parameter: nn.Parameter) -> None:
        alive = reference()
        if alive is not None and parameter.grad is not None:  # an autograd function may have returned none
            alive.gradient_arrived(parameter)

    return hook


def _remove(handles: list[torch.utils.hooks.RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


class WrappedParameter(NamedTuple):
    """A parameter, and what it was when its model was wrapped."""

    name: str
    parameter: nn.Parameter
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device

    def problem(self) -> str | None:
        """Say what keeps the parameter's gradient, if it has one, from being averaged, or return None."""
        name, parameter, dtype, shape, _ = self
        for before, now in ((dtype, parameter.dtype), (shape, parameter.shape)):
            if now != before:
                return _changed(name, before, now)
        gradient = parameter.grad
        if gradient is None:
            return None
        if gradient.dtype != dtype:
            return f"the gradient of {name!r} is {gradient.dtype}, its parameter {dtype}: that is not supported"
        return gradient_problem(repr(name), gradient)

    def device_problem(self) -> str | None:
        """Say that the parameter was moved to another device after it was wrapped, or return None."""
        now = self.parameter.device
        return _changed(self.name, f"on {self.device}", f"on {now}") if now != self.device else None


def _changed(name: str, *before_and_now: object) -> str:
    before, now = (tuple(each) if isinstance(each, torch.Size) else each for each in before_and_now)
    return f"{name!r} was {before} when the model was wrapped and is {now} now: wrap it again"
