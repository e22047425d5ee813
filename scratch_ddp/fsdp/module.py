"""`FSDP`: a model whose parameters, gradients and optimizer state are sharded over the ranks. All that users call."""

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from scratch_ddp.common.agreement import message_device
from scratch_ddp.common.clip_grad import clip_to_norm, total_norm
from scratch_ddp.common.optimizer_steps import parameters_of, watch_steps
from scratch_ddp.common.wrapper import Group, SyncSwitch
from scratch_ddp.fsdp import checkpoint
from scratch_ddp.fsdp.comm import Ranks
from scratch_ddp.fsdp.desync import Action
from scratch_ddp.fsdp.elementwise import elementwise_problem
from scratch_ddp.fsdp.freed_parameter import unmark
from scratch_ddp.fsdp.meta_init import Init
from scratch_ddp.fsdp.optimizer_state import show_rows_as_dtensors
from scratch_ddp.fsdp.plan import Spec, agree_on_plan
from scratch_ddp.fsdp.runtime import Runtime, install_hooks
from scratch_ddp.fsdp.state_dict import (
    full_state,
    load_full_state,
    load_sharded_state,
    sharded_state,
    write_full_state,
)
from scratch_ddp.fsdp.units import shard_model


class FSDP(SyncSwitch, nn.Module):
    """A model of which each rank holds a shard of every parameter, and gathers one unit at a time to compute with it.

    `group`: a process group, a dimension of a mesh (`mesh["dp"]`), or None for the default group. On a mesh of two
    dimensions each row of ranks holds the whole model in shards, and the rows are replicas of each other (HSDP).
    `units`: the modules to be gathered one at a time, or their names or types; by default the elements of the model's
    outermost `nn.ModuleList`s and `nn.Sequential`s. All other parameters belong to the root: gathered first, freed at
    the end of backward.
    `compute_dtype`: units are gathered and computed, and gradients averaged, in this dtype (torch.bfloat16); shards,
    their gradients and optimizer state keep the model's. Floating-point inputs are converted.
    `replicated`: modules, types or names of parameters that every rank keeps whole.
    `free_after_forward`: False keeps units between forward and backward: a third less communication, much more memory.
    `prefetch`: how many units ahead of their turn are gathered, while others compute.
    `sync`: "backward" calls `sync_gradients()` at the end of each backward outside `no_sync`, as under fully_shard. All
    ranks then run equally many backward passes, and micro-batches accumulate under `no_sync` only.
    `init(module)`: gives values to what is on the meta device (see `meta_init`), which then is on `device`.

    `parameters()` are the shards, under the model's own names: of a parameter of shape (d, …), ⌈d/n⌉ rows on each of n
    ranks, the last ranks fewer or none; a scalar is one row. An optimizer made from them, after wrapping, updates the
    model. From its first step on, its `state_dict()` has DTensors, as the model's has: so get_state_dict and
    set_state_dict of torch.distributed.checkpoint work.
    Call `sync_gradients()` after backward and before the optimizer's step: it leaves the mean in `.grad`, where until
    then a placeholder raises when it is read. A step without it raises, and so does the first step of an optimizer
    whose update of an element depends on others (Adafactor, Muon, LBFGS), and torch's clip_grad_norm_.
    Values start as the first rank's. A model without parameters can be wrapped too.
    Raises ValueError on every rank if one rank's model can't be wrapped, or if ranks differ.
    Cost: a pass gathers each unit with one all-gather, of which a rank sends (n-1)/n of the bytes, once in forward and
    once in backward; one reduce-scatter of as many bytes for its gradients; and a small all-reduce before each pass.
    On a mesh, n is the length of a row, and each unit's rows of the gradients are also all-reduced over the column.
    """

    is_sharded = True

    def __init__(
        self,
        model: nn.Module,
        group: Group = None,
        units: Spec = None,
        compute_dtype: torch.dtype | None = None,
        *,
        replicated: Spec = (),
        free_after_forward: bool = True,
        prefetch: int = 1,
        sync: str = "call",
        init: Init | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        ranks = Ranks.of(group)
        self.group = ranks.everyone
        settings = {"sync": sync, "compute_dtype": compute_dtype, "free_after_forward": free_after_forward}
        settings["prefetch"] = prefetch
        plan = agree_on_plan(model, self.group, units, replicated, settings)
        device = torch.device(device) if device is not None else None
        self._sharded = shard_model(model, plan, ranks, compute_dtype, init, device)
        self._runtime = Runtime(self._sharded, prefetch, free_after_forward, sync, do_sync=lambda: self.do_sync)
        self.hook_handles = install_hooks(self._runtime, compute_dtype)
        self.module = model
        self._accepted: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # they work on shards
        watch_steps(self)

    @property
    def world_size(self) -> int:
        """How many ranks share the model."""
        return dist.get_world_size(self.group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped model, which gathers its units as it comes to them. Every rank calls it alike."""
        return self.module(*args, **kwargs)

    def sync_gradients(self) -> None:
        """Leave in the shards' `.grad` this rank's rows of the gradients' mean over the ranks. Call it after backward.

        Does nothing under `no_sync()`. Most of the work has been done during backward. Parameters that have no gradient
        on any rank keep theirs, None at first. Buffers that have changed on any rank become the first rank's. Costs one
        small all-reduce, and what could not be done in backward: a reduce-scatter for each unit that had several
        forward passes, and one all-reduce per dtype for replicated parameters.
        """
        if self.do_sync:
            self._runtime.sync_gradients()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError on every rank if the optimizer steps too early, or can't work on shards."""
        self._runtime.before_step(optimizer)
        masters = {master for shards in self._sharded.shards for master in shards.masters.values()}
        if optimizer in self._accepted or masters.isdisjoint(parameters_of(optimizer)):
            return  # also of another model's optimizer, which may step when this model's group is gone
        if self.world_size > 1 and (problem := elementwise_problem(optimizer, masters)):
            raise ValueError(problem)  # the same on every rank
        self._accepted.add(optimizer)
        show_rows_as_dtensors(optimizer, self._sharded)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            "an FSDP can't be pickled or copied, since each rank holds shards that belong to a group of ranks: save it "
            "with save(), full_state_dict() or state_dict(), and load that into a new FSDP of the same model"
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise AttributeError(f"{error}: the wrapped model is .module") from None

    def _fqn_modifiers(self) -> dict[str, str]:
        """Where to find what has the model's own names: torch.distributed.checkpoint.state_dict asks for it."""
        model = self.module
        return dict.fromkeys([*model._modules, *model._parameters, *model._buffers], "module")

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The shards, and replicated parameters whole, under the model's own names (no "module.") and in its order."""
        masters = self._sharded.masters()
        for name, first in self._sharded.first_names.items():
            if name == first or not remove_duplicate:
                yield f"{prefix}.{name}".lstrip("."), masters[first]

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; return the norm before, a float64 scalar.

        Does what torch.nn.utils.clip_grad_norm_ does to whole gradients, alike on every rank. That function itself,
        on shards, would scale each rank's rows differently. Call it after `sync_gradients`. One all-reduce of 8 bytes.
        """
        sharded = _gradients(master for shards in self._sharded.shards for master in shards.masters.values())
        replicated = _gradients(self._sharded.replicated.masters.values())
        norm = total_norm(sharded, replicated, norm_type, message_device(self.group), self._sharded.ranks.row)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"the gradients' norm of order {norm_type} is {norm.item()}: they can't be clipped")
        clip_to_norm([*sharded, *replicated], norm, max_norm)
        return norm

    def gather_full_params(self) -> dict[str, torch.Tensor]:
        """Return all parameters whole, on every rank, in the model's own dtype; tied ones under each of their names.

        Costs one all-gather per unit, and memory for the whole model.
        """
        return self._gather_full("gather_full_params()", lambda master: master)

    def gather_full_grads(self) -> dict[str, torch.Tensor | None]:
        """Return the shards' gradients whole, on every rank, after `sync_gradients`; None where there is none."""
        return self._gather_full("gather_full_grads()", lambda master: master.grad)

    def _gather_full(
        self, method: str, of: Callable[[nn.Parameter], torch.Tensor | None]
    ) -> dict[str, torch.Tensor | None]:
        absent = [name for name, master in self._sharded.masters().items() if of(master) is None]
        self._runtime.meet(Action.METHOD, method, f"without {', '.join(absent)}")
        full = {name: of(master) for name, master in self._sharded.replicated.masters.items()}
        full = {name: None if tensor is None else tensor.detach().clone() for name, tensor in full.items()}
        for shards in self._sharded.shards:
            full |= shards.gather_full({name: of(master) for name, master in shards.masters.items()})
        return {name: full[first] for name, first in self._sharded.first_names.items()}

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the state dict of the whole model, in main memory, on the first rank; an empty one elsewhere.

        It is what the plain model's `state_dict()` would be, buffers and tied names included. Every rank calls it. One
        all-gather per unit.
        """
        self._runtime.meet(Action.METHOD, "full_state_dict()")
        return full_state(self._sharded)

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor] | str | os.PathLike | None = None) -> None:
        """Load the state dict of a whole model, or the file with it, that the first rank passes; others may pass None.

        Every rank calls it. Raises ValueError on every rank if it can't be read, or is of another model or dtype. One
        broadcast per unit.
        """
        self._runtime.meet(Action.METHOD, "load_full_state_dict()")
        load_full_state(self._sharded, state)

    def save_full_state_dict(self, path: str | os.PathLike) -> None:
        """Let the first rank write `full_state_dict()` to a file, which replaces an older one when it is complete.

        Every rank calls it. Raises OSError on every rank if it can't be written.
        """
        write_full_state(path, self.full_state_dict(), self.group)

    def state_dict(self, *, destination: dict[str, Any] | None = None, prefix: str = "", **_: Any) -> dict[str, Any]:
        """Return this rank's shards as DTensors, under the model's own names, and all other tensors whole.

        For torch.distributed.checkpoint, as of a model under `fully_shard`. The tensors share the model's memory. No
        communication.
        """
        destination = {} if destination is None else destination
        mine = sharded_state(self._sharded)
        destination.update({prefix + key: value for key, value in mine.items()})
        return destination

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Load what `state_dict()` returned, or the whole model's state dict; return the missing and unexpected names.

        Every rank calls it, with DTensors of as many ranks, or with whole tensors. Raises ValueError on every rank if a
        tensor does not fit, or with `strict` if one is missing or unexpected. `assign` must be False: values are copied
        into the shards.
        """
        self._runtime.meet(Action.METHOD, "load_state_dict()", f"strict {strict}, assign {assign}")
        if assign:
            raise ValueError("assign=True would replace the shards, which are views of one tensor: leave it out")
        return _IncompatibleKeys(*load_sharded_state(self._sharded, state_dict, strict))

    def _load_from_state_dict(self, *_: Any) -> None:
        raise RuntimeError(  # called by the load_state_dict() of a module that holds this one
            "an FSDP can't be loaded through a module that holds it: call its own load_state_dict() or load(), or wrap "
            "the outermost one instead, FSDP(outer)"
        )

    def save(
        self, folder: str | os.PathLike, optimizer: torch.optim.Optimizer | None = None, extra: Any = None
    ) -> None:
        """Write the model, and the optimizer's state, to a folder on a file system that all ranks share.

        Every rank calls it and writes its own shards, through torch.distributed.checkpoint. `extra`: numbers, strings,
        tensors, lists and dicts, the first rank's, that `load` returns. An older checkpoint in the folder is replaced
        when the new one is complete: however a save ends, one of them is there. Raises OSError or ValueError on every
        rank where it can't be done.
        """
        self._runtime.meet(Action.METHOD, "save()")
        checkpoint.save(self._sharded, folder, optimizer, extra)

    def collect_checkpoint(self, optimizer: torch.optim.Optimizer | None = None, extra: Any = None) -> tuple[dict, Any]:
        """Return what `save` writes: tensors, which share the model's memory, and all that is not a tensor.

        Every rank calls it. Raises ValueError on every rank if the optimizer's state can't be saved.
        """
        self._runtime.meet(Action.METHOD, "collect_checkpoint()")
        return checkpoint.collect(self._sharded, optimizer, extra)

    def load(self, folder: str | os.PathLike, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Load what `save` has written, on any number of ranks; return the `extra` of it. Every rank calls it.

        Raises ValueError on every rank if the checkpoint is of another model, dtype or optimizer, or was cut short;
        model and optimizer are then as before, unless the message says otherwise.
        """
        self._runtime.meet(Action.METHOD, "load()")
        return checkpoint.load(self._sharded, folder, optimizer)

    def remove_hooks(self) -> None:
        """Make the wrapped model an ordinary module again, whole on every rank. One all-gather per unit."""
        self._runtime.meet(Action.METHOD, "remove_hooks()")
        for handle in self.hook_handles:
            handle.remove()
        self.hook_handles.clear()
        for unit in self._sharded.units:
            unit.wait_for_gather()
            for parameter in unit.parameters():
                unmark(parameter)


class ShardedGradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler for a sharded model: a gradient that overflowed on one rank makes all ranks skip the step.

    A rank sees only its own rows of the gradients, and would otherwise decide alone. Used as torch's; `device` is "cpu"
    or "cuda". Each `unscale_` (or the `step` that calls it) costs one all-reduce of one number over `group`.
    """

    def __init__(self, device: str = "cuda", group: dist.ProcessGroup | None = None, **settings: Any):
        super().__init__(device, **settings)
        self.group = group

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
        found = super()._unscale_grads_(*args, **kwargs)  # by device: 1 if a gradient is not finite
        place = message_device(self.group)
        here = [torch.zeros((), device=place), *(each.to(place).squeeze() for each in found.values())]
        anywhere = torch.stack(here).max()
        dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=self.group)
        devices = list(found) or [torch.device(self._device)]  # a rank may have no gradient of its own
        return {device: anywhere.to(device).reshape(1) for device in devices}


def _gradients(masters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [master.grad for master in masters if master.grad is not None]
