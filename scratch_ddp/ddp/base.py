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
`sync_gradients`. One that reduces after backward reads `do_sync` there; `reducer` has those that reduce during it.
"""

import functools
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from scratch_ddp.common.agreement import check_everywhere, compare, digest, raise_everywhere, together
from scratch_ddp.common.optimizer_steps import REDUCED, SYNC_FORGOTTEN, parameters_of, watch_steps
from scratch_ddp.common.replicas import (
    OTHER_BUFFERS,
    broadcast_from_first,
    complete_gradient,
    describe,
    gradient_problem,
    modules_of,
    persistent_buffers,
)
from scratch_ddp.common.wrapper import Group, OnItsWay, SyncSwitch, process_group

_wrappers: "weakref.WeakSet[ReplicatedModule]" = weakref.WeakSet()  # all that are alive


class ReplicatedModule(SyncSwitch, nn.Module):
    """A model of which every rank of `group` holds a replica. The base of the strategies, not a strategy itself.

    `group` is a process group, a dimension of a mesh (`mesh["dp"]`), or None for the default group. Raises ValueError
    on every rank if the model is sharded or wrapped already, or if the ranks' models differ in names, shapes or dtypes.
    Costs one small all-reduce.

    An optimizer that steps with gradients that were not synchronised raises ValueError, on every rank, unless
    synchronisation is switched off at that moment.
    """

    takes_gradients = False  # True for a strategy that takes gradients away when they arrive

    def __init__(self, model: nn.Module, group: Group = None):
        super().__init__()
        self.group = process_group(group)
        self.world_size = dist.get_world_size(self.group)  # how many ranks hold a replica
        with together(self.group, complaint="the ranks wrap different models: do the same everywhere") as lines:
            if sharded := [name for name, each in model.named_parameters() if isinstance(each, DTensor)]:
                raise ValueError(
                    f"{sharded[0]!r} is a shard, so that ranks hold different parameters: to replicate shards (HSDP), "
                    "give FSDP itself a mesh of two dimensions, FSDP(model, mesh)"
                )
            for other in _wrappers:
                takes = other.hook_handles and (other.takes_gradients or self.takes_gradients)
                if takes and not set(model.parameters()).isdisjoint(other.module.parameters()):
                    raise ValueError(f"it is wrapped in {type(other).__name__} already: call its remove_hooks() first")
            lines += describe(model)
        self.module, self._named = model, list(model.named_parameters())
        self._when_wrapped = self._parameters_now()
        self._unsynchronised = False  # a gradient has come since the last `sync_gradients()`
        comes = functools.partial(type(self).gradient_comes, weakref.proxy(self))  # hooks don't keep the wrapper alive
        trained = (each for each in model.parameters() if each.requires_grad)
        self.hook_handles = [each.register_hook(functools.partial(comes, each)) for each in trained]
        weakref.finalize(self, _remove, self.hook_handles)
        _wrappers.add(self)
        watch_steps(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped model. No communication."""
        return self.module(*args, **kwargs)

    def sync_gradients(self) -> None:
        """Replace each gradient by its mean over the ranks, unless synchronisation is switched off."""
        raise NotImplementedError(type(self).__name__)

    def gradient_comes(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Called when autograd is about to add `gradient` to the parameter's."""
        if not self._unsynchronised:  # a module's attributes are read faster than they are set
            self._unsynchronised = True

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError on every rank if the optimizer would step with gradients that were not synchronised."""
        if self._unsynchronised and self.do_sync:
            held = parameters_of(optimizer)
            local = (each.grad for _, each in self._named if each in held and each.grad is not None)
            if any(isinstance(each, OnItsWay) or (not hasattr(each, REDUCED) and each.any()) for each in local):
                self.end_step(SYNC_FORGOTTEN)

    def end_step(self, problem: str) -> None:
        """Raise ValueError on every rank, also on those that synchronise."""
        self.exchange([0] * len(self._named), problem)

    def __reduce_ex__(self, protocol: Any) -> Any:
        name = type(self).__name__
        raise TypeError(f"a {name} can't be pickled or copied, since it belongs to a group of ranks: take its .module")

    def remove_hooks(self) -> None:
        """Remove this strategy's hooks from the model's parameters; the model is then an ordinary module again."""
        _remove(self.hook_handles)
        self._unsynchronised = False

    def parameters_with_gradient(self) -> list[nn.Parameter]:
        """Return the parameters that have a gradient on any rank, in one order; where this rank has none, zeros.

        Parameters without elements are left out. Communicates and raises as `exchange` does.
        """
        mine = [int(each.requires_grad and each.grad is not None) for _, each in self._named]
        anywhere = self.exchange(mine, self.problem())
        present = [each for (_, each), somewhere in zip(self._named, anywhere, strict=True) if somewhere]
        for parameter in present:
            complete_gradient(parameter)
        return [parameter for parameter in present if parameter.numel()]

    def exchange(self, presence: list[int], problem: str | None, abandoned: bool = False) -> list[int]:
        """Exchange which gradients each rank has; return the largest number of any rank for each parameter.

        `presence` has a number for each parameter of the model, 0 where it has no gradient. Raises ValueError on every
        rank if any rank has a `problem`, unless all ranks have `abandoned` the step. Buffers that a state dict holds
        (BatchNorm's statistics) take the first rank's values, and must have one shape; caches need not.

        Costs one all-reduce of 8 bytes per parameter, and `broadcast_from_first` of such buffers. The answer is read on
        the processor, which over NCCL waits for all messages under way.
        """
        buffers = persistent_buffers(self.module)
        votes = {"refused": problem is not None, "going on": not abandoned}
        found = compare(self.group, {"buffers": digest([*buffers])}, votes, presence)
        if found.largest["refused"] and found.largest["going on"]:
            raise_everywhere(problem, self.group)
        if found.different:
            check_everywhere([*buffers], OTHER_BUFFERS, self.group)
        broadcast_from_first(buffers.values(), self.group)
        self._unsynchronised = False
        return found.flags

    def problem(self) -> str | None:
        """Say what keeps this rank from averaging its gradients, or return None."""
        if [*map(id, self._parameters_now())] != [*map(id, self._when_wrapped)]:
            return "parameters were added, removed, replaced or tied after the model was wrapped: wrap it again"
        gradients = ((repr(name), each.grad) for name, each in self._named if each.grad is not None)
        problems = (gradient_problem(*each) for each in gradients if not isinstance(each[1], OnItsWay))
        return next(filter(None, problems), None)

    def _parameters_now(self) -> list[nn.Parameter | None]:
        """The parameter under each name of each module; a tied one several times."""
        return [each for module in modules_of(self.module) for each in module._parameters.values()]


def _remove(handles: list[torch.utils.hooks.RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
