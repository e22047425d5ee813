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
`sync_gradients`. One that reduces after backward reads `do_sync` there; one that reduces from gradient hooks reads it
when a gradient arrives, keeps its hooks' handles in `hook_handles`, and waits in `sync_gradients`.
"""

import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from scratch_ddp.common.accounting import set_up
from scratch_ddp.common.agreement import check_same_lines, message_device, raise_everywhere
from scratch_ddp.common.replicas import (
    Buffers,
    broadcast_from_first,
    buffers_of,
    check_same_structure,
    complete_gradient,
    modules_of,
    why_not,
)
from scratch_ddp.common.wrapper import SyncSwitch, process_group

# FOLDED: Gradients as they must be to be averaged over ranks, and what keeps one from it.


class Wrapped(NamedTuple):
    """A parameter as it was when its model was wrapped."""

    name: str
    parameter: nn.Parameter
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device

    def refusal(self) -> str | None:
        """Say what keeps the parameter's gradient from being averaged, or return None: nothing, or there is none."""
        name, parameter, dtype, shape, _ = self
        for then, now in ((dtype, parameter.dtype), (shape, parameter.shape)):
            if now != then:
                return _changed(name, then, now)
        gradient = parameter.grad
        if gradient is None:
            return None
        if gradient.layout != torch.strided:
            return f"the gradient of {name!r} is sparse; only dense gradients can be averaged (sparse=False)"
        if gradient.dtype != dtype:
            return f"the gradient of {name!r} is {gradient.dtype}, its parameter {dtype}: that is not supported"
        if gradient.requires_grad:
            return f"the gradient of {name!r} has a graph of its own: no double backward through a mean over ranks"
        return None

    def moved(self) -> str | None:
        """Say that the parameter is on another device than when it was wrapped, or return None."""
        now = self.parameter.device
        return _changed(self.name, f"on {self.device}", f"on {now}") if now != self.device else None


def wrapped(model: nn.Module) -> list[Wrapped]:
    """All parameters, each once, in the order of their registration."""
    return [Wrapped(name, each, each.dtype, each.shape, each.device) for name, each in model.named_parameters()]


def in_their_places(model: nn.Module) -> list[nn.Parameter | None]:
    """What stands in each place for a parameter, tied ones in several."""
    return [each for module in modules_of(model) for each in module._parameters.values()]


def _changed(name: str, *then_and_now: object) -> str:
    then, now = (tuple(each) if isinstance(each, torch.Size) else each for each in then_and_now)
    return f"{name!r} was {then} when the model was wrapped and is {now} now: wrap it again"


hooked_modules: "weakref.WeakSet[ReplicatedModule]" = weakref.WeakSet()  # those with hooks on their parameters


class ReplicatedModule(SyncSwitch, nn.Module):
    """A model of which every rank of `group` holds a replica. The base of the strategies, not one itself.

    `group` is a process group, a dimension of a mesh (`mesh["dp"]`), or None for the default group. Hooks that another
    strategy has put on the model are removed: the newest wrapper is the one that works from hooks. A model without
    parameters, or with none to train, is wrapped too: its buffers are kept equal, and no gradient travels.
    A strategy passes its `settings` in words, and the `problem` that it has with them, if any. Raises ValueError on
    every rank if any rank has a problem, or if the ranks' models differ in names, shapes or dtypes, or in what they
    are wrapped in. Costs three small exchanges.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        settings: str = "",
        problem: str | None = None,
    ):
        super().__init__()
        self.group = process_group(group)
        raise_everywhere(problem or why_not(model, self.group), self.group)
        strategy = f"{type(self).__name__}({settings})"
        check_same_lines([strategy], "the ranks wrap their models differently; do the same everywhere", self.group)
        check_same_structure(model, self.group)
        self.module = model
        self.hook_handles: list[torch.utils.hooks.RemovableHandle] = []
        self._wrapped = wrapped(model)
        self._places = in_their_places(model)
        for other in self._others_with_hooks():
            other.remove_hooks()
        self._buffers_of_all = Buffers(model, self.group)
        self._buffer_count = len(buffers_of(model))

    @property
    def world_size(self) -> int:
        """How many ranks hold a replica."""
        return dist.get_world_size(self.group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped model. No communication."""
        return self.module(*args, **kwargs)

    def sync_gradients(self) -> None:
        """Replace each gradient by its mean over the ranks, unless synchronisation is switched off."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it synchronises")

    def remove_hooks(self) -> None:
        """Take this strategy's hooks off the model's parameters; the model is then an ordinary module again."""
        for handle in self.hook_handles:
            handle.remove()
        self.hook_handles.clear()

    def parameters_with_gradient(self) -> list[nn.Parameter]:
        """Return the parameters that have a gradient on any rank: the same list in the same order on every rank.

        Where this rank has no gradient, it gets zeros. Parameters without elements are left out. Communicates and
        raises as `agree_on` says.
        """
        mine = [int(parameter.requires_grad and parameter.grad is not None) for _, parameter, *_ in self._wrapped]
        anywhere = self.agree_on(mine, self._problem())
        present = [each.parameter for each, somewhere in zip(self._wrapped, anywhere, strict=True) if somewhere]
        for parameter in present:
            complete_gradient(parameter)
        return [parameter for parameter in present if parameter.numel()]

    def agree_on(self, presence: list[int], problem: str | None, given_up: bool = False) -> list[int]:
        """Tell the ranks which gradients this rank has; return for each parameter the largest number of any rank.

        `presence` has a number from 0 (none) to 255 for each parameter of the model. Buffers that changed on any rank
        (BatchNorm's statistics) take the first rank's values, as in torch's DDP. Raises ValueError on every rank if
        any rank has a `problem`, unless every rank says that it has `given_up` the step. Costs one all-reduce of a byte
        for each parameter and buffer; a broadcast a dtype for buffers. The answer is read on the
        processor: over NCCL, whose messages go one after the other, the processor waits here for all that are under way
        and starts no more work on the GPU meanwhile.
        """
        changed = [False] * self._buffer_count if problem else self._buffers_of_all.changed()
        with set_up():
            message = torch.tensor([problem is not None, not given_up, *presence, *changed], dtype=torch.uint8)
            message = message.to(message_device(self.group))
            dist.all_reduce(message, dist.ReduceOp.MAX, group=self.group)
            refused, going_on, *anywhere = message.tolist()
            if refused and going_on:
                raise_everywhere(problem, self.group)
            self._buffers_of_all.copy_from_first(anywhere[len(presence) :])
        return anywhere[: len(presence)]

    def copy_from_first(self) -> None:
        """Give every rank the first rank's parameters and buffers. Costs one broadcast a dtype."""
        with set_up():
            broadcast_from_first([*self.module.parameters(), *self.module.buffers()], self.group)
        self._buffers_of_all.remember()

    def _problem(self) -> str | None:
        """Say what keeps this rank from averaging its gradients, or return None."""
        if [id(each) for each in in_their_places(self.module)] != [id(each) for each in self._places]:
            return "parameters were added, removed, replaced or tied after the model was wrapped: wrap it again"
        for other in self._others_with_hooks():
            return f"the model was wrapped again in {type(other).__name__}, whose hooks take its gradients: use that"
        return self._buffers_of_all.problem() or next(filter(None, (each.refusal() for each in self._wrapped)), None)

    def _others_with_hooks(self) -> list["ReplicatedModule"]:
        others = [each for each in hooked_modules if each is not self]
        mine = {each.parameter for each in self._wrapped} if others else set()
        return [each for each in others if not mine.isdisjoint(each.module.parameters())]
