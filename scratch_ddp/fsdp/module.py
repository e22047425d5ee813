"""`FSDP`: a model whose parameters, gradients and optimizer state are sharded over the ranks. All that users call."""

import os
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.common.accounting import set_up
from scratch_ddp.common.agreement import message_device
from scratch_ddp.common.clip_grad import clip_to_norm, total_norm
from scratch_ddp.common.optimizer_steps import parameters_of, watch_steps
from scratch_ddp.common.wrapper import Group, SyncSwitch
from scratch_ddp.fsdp import checkpoint
from scratch_ddp.fsdp.comm import Ranks
from scratch_ddp.fsdp.hooks import install_hooks
from scratch_ddp.fsdp.passes import Runtime
from scratch_ddp.fsdp.plan import REPLACED, Init, Spec, agree_on_plan, make_units

NOT_YET = "gradients wait for sync_gradients(): call it before they are clipped"


class FSDP(SyncSwitch, nn.Module):
    """A model of which each rank holds a shard of every parameter, and gathers one unit at a time to compute with it.

    `group`: a process group, a dimension of a mesh (`mesh["dp"]`), or None for the default group. On a mesh of two
    dimensions each row of ranks holds the whole model in shards, and the rows are replicas of each other (HSDP).
    `units`: the modules to be gathered one at a time, or their names or types; by default the elements of the model's
    outermost `nn.ModuleList`s and `nn.Sequential`s. All other parameters belong to the root: gathered first, freed at
    the end of backward.
    `compute_dtype`: units are gathered and computed, and gradients averaged, in this dtype (torch.bfloat16); shards,
    their gradients and optimizer state keep the model's. Floating-point inputs are converted.
    `free_after_forward`: False keeps units between forward and backward: a third less communication, much more memory.
    `prefetch`: how many units ahead of their turn are gathered, while others compute.
    `sync`: "backward" calls `sync_gradients()` at the end of each backward outside `no_sync`, as under fully_shard. All
    ranks then run equally many backward passes, and micro-batches accumulate under `no_sync` only.
    `init(module)`: gives values to what is on the meta device, `reset_parameters()` by default; it then is on `device`.
    No rank ever holds more of such a model than its shards and one unit.

    Between passes the model's parameters are its shards, DTensors under their own names: of a parameter of shape
    (d, …), ⌈d/n⌉ rows on each of n ranks, the last ranks fewer or none. So torch's state dicts, checkpoints,
    clip_grad_norm_ and optimizers work on them. Make the optimizer after wrapping.
    Call `sync_gradients()` after backward and before the optimizer's step, which raises without it: it leaves the mean
    in `.grad`. Until then a placeholder stands there that raises when it is read; clearing it throws the gradient away.
    Values start as the first rank's; its persistent buffers count after each synchronisation too. A model without
    parameters can be wrapped too.
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
        free_after_forward: bool = True,
        prefetch: int = 1,
        sync: str = "call",
        init: Init | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        ranks = Ranks(group)
        self.group = ranks.everyone
        settings = {"sync": sync, "compute_dtype": compute_dtype, "free_after_forward": free_after_forward}
        settings["prefetch"] = prefetch
        plan = agree_on_plan(model, self.group, units, settings)
        device = torch.device(device) if device is not None else message_device(self.group)
        with set_up():
            made = make_units(plan, ranks, compute_dtype, init, device)
        self._runtime = Runtime(model, made, self.group, prefetch, free_after_forward, sync, lambda: self.do_sync)
        install_hooks(self._runtime, plan.modules, compute_dtype)
        self.module, self._units, self._row = model, made, ranks.row
        self._shapes = {each: rows.shape for unit in made for each, rows in zip(unit.shards, unit.rows, strict=True)}
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # that have stepped
        watch_steps(self)

    @property
    def world_size(self) -> int:
        """How many ranks share the model."""
        return dist.get_world_size(self.group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped model, which gathers its units as it comes to them. Every rank calls it alike."""
        try:
            return self.module(*args, **kwargs)
        except RuntimeError as error:
            if "DTensor" in str(error):
                error.add_note(
                    "A DTensor is a parameter of a unit that is not being called. Where a module reads its children's "
                    "parameters itself, name that module in units."
                )
            raise

    def sync_gradients(self) -> None:
        """Leave in the shards' `.grad` this rank's rows of the gradients' mean over the ranks. Call it after backward.

        Does nothing under `no_sync()`. Most of the work has been done during backward. Parameters that have no gradient
        on any rank keep theirs, None at first. If a persistent buffer has changed on any rank, all become the first
        rank's. Costs one small all-reduce, and what could not be done in backward: a reduce-scatter for each unit that
        had several forward passes.
        """
        if self.do_sync:
            self._runtime.sync_gradients()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError on every rank if the optimizer steps too early, or was made before the model was wrapped."""
        mine = parameters_of(optimizer)
        if optimizer not in self._optimizers:
            if stale := [getattr(each, REPLACED) for each in mine if hasattr(each, REPLACED)]:
                raise ValueError(
                    f"the optimizer was made from the parameter {min(stale)!r} that the model had before "
                    "it was wrapped: make it from the parameters() of the FSDP"
                )
            if self._shapes.keys().isdisjoint(mine):
                return  # another model's, which may step when this model's group is gone
            self._optimizers.add(optimizer)
            optimizer.register_step_post_hook(lambda *_: self._runtime.after_step())
        self._runtime.before_step(mine)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; return the norm before, a float64 scalar.

        As torch.nn.utils.clip_grad_norm_, which is right on the shards too, but raises on every rank if it is called on
        one alone, or before `sync_gradients`. Two small all-reduces.
        """
        on_their_way = any(unit.on_their_way for unit in self._units)
        self._runtime.meet("calls clip_grad_norm_()", problem=NOT_YET if on_their_way else None)
        gradients = [each.grad.to_local() for each in self._shapes if each.grad is not None]
        norm = total_norm(gradients, norm_type, message_device(self.group), self._row)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"the gradients' norm of order {norm_type} is {norm.item()}: they can't be clipped")
        clip_to_norm(gradients, norm, max_norm)
        return norm

    def gather_full_params(self) -> dict[str, torch.Tensor]:
        """Return all parameters whole, on every rank, in the model's own dtype; tied ones under each of their names.

        Costs one all-gather per parameter, and memory for the whole model.
        """
        self._meet("gather_full_params()")
        named = self.named_parameters(remove_duplicate=False)
        return {name: each.detach().full_tensor().view(self._shapes[each]) for name, each in named}

    def gather_full_grads(self) -> dict[str, torch.Tensor | None]:
        """Return the shards' gradients whole, on every rank, after `sync_gradients`; None where there is none."""
        named = dict(self.named_parameters(remove_duplicate=False))
        self._meet("gather_full_grads()", f"without {[name for name, each in named.items() if each.grad is None]}")
        return {
            name: None if each.grad is None else each.grad.full_tensor().view(self._shapes[each])
            for name, each in named.items()
        }

    def full_state_dict(self) -> dict[str, Any]:
        """Return the state dict of the whole model, in main memory, on the first rank; an empty one elsewhere.

        It is what the plain model's `state_dict()` would be, buffers and tied names included. Every rank calls it. One
        all-gather per parameter.
        """
        self._meet("full_state_dict()")
        return checkpoint.full_state(self.module)

    def load_full_state_dict(self, state: Mapping[str, Any] | None = None) -> None:
        """Load the state dict of a whole model that the first rank of all passes; others may pass None.

        Every rank calls it. Raises ValueError on a group of some ranks, whose first rank may be another one: there,
        each rank passes the whole state dict to `load_state_dict()`. One broadcast per parameter.
        """
        if self.world_size < dist.get_world_size():
            raise ValueError("this FSDP is held by some of the ranks: pass the state dict to load_state_dict() on each")
        self._meet("load_full_state_dict()")
        checkpoint.load_full_state(self, state)
        self._runtime.mark_loaded()

    def save(
        self, folder: str | os.PathLike, optimizer: torch.optim.Optimizer | None = None, extra: Any = None
    ) -> None:
        """Write the model, and the optimizer's state, to a folder on a file system that all ranks share.

        Every rank calls it and writes its own shards, through torch.distributed.checkpoint. `extra`: numbers, strings,
        tensors, lists and dicts, the first rank's, that `load` returns. An older checkpoint in the folder is replaced
        when the new one is complete: however a save ends, one of them is there. Raises OSError or ValueError on every
        rank where it can't be done.
        """
        self._meet("save()")
        checkpoint.save(self.module, folder, optimizer, extra, self.group)

    def load(self, folder: str | os.PathLike, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Load what `save` has written, on any number of ranks; return the `extra` of it. Every rank calls it.

        Raises ValueError on every rank if the checkpoint is of another model or optimizer, or was cut short;
        model and optimizer are then as before, unless the message says otherwise.
        """
        self._meet("load()")
        extra = checkpoint.load(self.module, folder, optimizer, self.group)
        self._runtime.mark_loaded()
        return extra

    # As a module under `fully_shard`: the wrapped model's own names

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """This module, and the wrapped model's under their own names (no "module."): so are all parameters."""
        self._runtime.rest()
        memo = set() if memo is None else memo
        if self not in memo:
            memo.update([self] if remove_duplicate else [])
            yield prefix, self
            yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the wrapped model's state dict: this rank's shards as DTensors, all other tensors whole.

        For torch.distributed.checkpoint, as of a model under `fully_shard`. The tensors share the model's memory. No
        communication.
        """
        self._runtime.rest()
        return self.module.state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Called by `load_state_dict()`, also of a module that holds this one: names get "module." before they go on.

        Every rank calls that with the DTensors of `state_dict()`, or with whole tensors, which are cut.
        """
        self._runtime.rest()
        mine = {key.removeprefix(prefix): state_dict.pop(key) for key in list(state_dict) if key.startswith(prefix)}
        rows = checkpoint.as_rows(mine, self.module)
        state_dict |= {f"{prefix}module.{key}": value for key, value in rows.items()}
        self._runtime.mark_loaded()

    def _fqn_modifiers(self) -> dict[str, str]:
        """Where to find what has the model's own names: torch.distributed.checkpoint.state_dict asks for it."""
        model = self.module
        return dict.fromkeys([*model._modules, *model._parameters, *model._buffers], "module")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise AttributeError(f"{error}: the wrapped model is .module") from None

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            "an FSDP can't be pickled or copied, since each rank holds shards that belong to a group of ranks: save it "
            "with save(), full_state_dict() or state_dict(), and load that into a new FSDP of the same model"
        )

    def _meet(self, method: str, *details: str) -> None:
        """Before a method that needs every rank: it is called on all of them, and all units hold their shards."""
        self._runtime.meet(f"calls {method}", *details)
        self._runtime.rest()
