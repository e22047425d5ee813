"""`FSDP`: a model whose parameters, gradients and optimizer state are sharded over the ranks. All that users call."""

import os
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from scratch_ddp.common.accounting import set_up
from scratch_ddp.common.agreement import message_device
from scratch_ddp.common.optimizer_steps import SYNC_FORGOTTEN, parameters_of, watch_steps
from scratch_ddp.common.wrapper import Group, OnItsWay, SyncSwitch
from scratch_ddp.fsdp import checkpoint
from scratch_ddp.fsdp.comm import Ranks
from scratch_ddp.fsdp.passes import Runtime
from scratch_ddp.fsdp.plan import REPLACED, Init, Spec, agree_on_plan, make_units


class FSDP(SyncSwitch, nn.Module):
    """A model of which each rank holds a shard of every parameter, and gathers one unit at a time to compute with it.

    `group`: a process group, a dimension of a mesh (`mesh["dp"]`), or None for the default group. On a mesh of two
    dimensions each row of ranks holds the whole model in shards, and the rows are replicas of each other (HSDP).
    `units`: the modules to be gathered one at a time, or their types; by default the elements of the model's
    outermost `nn.ModuleList`s and `nn.Sequential`s. A module that reads its children's parameters itself must be one
    of them: parameters of a unit that is not being called are DTensors. All other parameters belong to the root:
    gathered first, freed at the end of backward.
    `compute_dtype`: units are gathered and computed, and gradients averaged, in this dtype (torch.bfloat16); shards,
    their gradients and optimizer state keep the model's. Floating-point inputs are converted, also in tuples, lists
    and dicts.
    `free_after_forward`: False keeps units between forward and backward: a third less communication, much more memory.
    `prefetch`: how many units ahead of their turn are gathered, while others compute.
    `init(module)`: gives values to what is on the meta device, module by module, `reset_parameters()` by default; it
    then is on `device`. No rank ever holds more of such a model than its shards and one unit.

    Between passes the model's parameters are its shards, DTensors under their own names: of a parameter of shape
    (d, …), ⌈d/n⌉ rows on each of n ranks, the last ranks fewer or none. Make the optimizer after wrapping.
    Call `sync_gradients()` after backward and before the optimizer's step, which raises without it: it leaves the mean
    in `.grad`. Until then a placeholder stands there that raises when it is read; clearing it throws the gradient away.
    Values start as the first rank's; its persistent buffers count after each synchronisation too.
    Raises ValueError on every rank if one rank's model can't be wrapped, or if ranks differ.
    Cost: a pass gathers each unit with one all-gather, of which a rank sends (n-1)/n of the bytes: once in forward and
    once in backward, but for the root and the last unit, which stay; one reduce-scatter of as many bytes for its
    gradients; and a small all-reduce before each pass.
    On a mesh, n is the length of a row, and each unit's rows of the gradients are also all-reduced over the column.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Group = None,
        units: Spec = None,
        compute_dtype: torch.dtype | None = None,
        *,
        free_after_forward: bool = True,
        prefetch: int = 1,
        init: Init | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        ranks = Ranks(group)
        self.group = ranks.everyone
        self.world_size = dist.get_world_size(self.group)  # how many ranks share the model
        settings = {"compute_dtype": compute_dtype, "prefetch": prefetch, "free_after_forward": free_after_forward}
        plan = agree_on_plan(model, self.group, units, settings)
        device = torch.device(device) if device is not None else message_device(self.group)
        with set_up():
            units = make_units(model, plan, ranks, compute_dtype, init, device)
        self._runtime = Runtime(model, units, self.group, lambda: self.do_sync, **settings)
        self._shapes = {each.shard: each.shape for unit in units for each in unit.pieces}
        # How many parameters the optimizers had when they last stepped.
        self._counted: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        # It holds what the model holds, not the model: so all names are the model's own.
        tables = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")
        self.__dict__ |= {"module": model, **{name: getattr(model, name) for name in tables}}
        watch_steps(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped model, which gathers its units as it comes to them. Every rank calls it alike."""
        return self.module(*args, **kwargs)

    def sync_gradients(self) -> None:
        """Leave in the shards' `.grad` this rank's rows of the gradients' mean over the ranks. Call it after backward.

        Does nothing under `no_sync()`. Parameters that have no gradient on any rank keep theirs, None at first.
        Costs one small all-reduce, broadcasts of persistent buffers (one per dtype), on a mesh an all-reduce of each
        unit's rows, and a reduce-scatter for each unit that had several forward passes.
        """
        if self.do_sync:
            self._runtime.sync_gradients()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError on every rank if the optimizer steps too early, or was made before the model was wrapped."""
        mine = parameters_of(optimizer)
        if stale := [getattr(each, REPLACED) for each in mine if hasattr(each, REPLACED)]:
            raise ValueError(
                f"the optimizer was made from the parameter {min(stale)!r} that the model had before it was wrapped, "
                "or in a pass: make it from the parameters() of the FSDP"
            )
        if self._counted.get(optimizer) != len(mine):
            others = mine - self._shapes.keys()
            if added := [name for name, each in self.module.named_parameters() if each in others]:
                raise ValueError(
                    f"{added[0]!r} was added after the model was wrapped, and is not synchronised: do that before"
                )
        if self._shapes.keys().isdisjoint(mine):
            return  # another model's, which may step when this model's group is gone
        if optimizer not in self._counted:
            optimizer.register_step_post_hook(lambda *_: self._runtime.count_step())
        self._counted[optimizer] = len(mine)
        if any(isinstance(each.grad, OnItsWay) for each in self._shapes.keys() & mine):
            self._runtime.meet("begins a step of the optimizer", problem=SYNC_FORGOTTEN)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; return the norm before, a scalar.

        As torch.nn.utils.clip_grad_norm_, which is right on the shards too, but raises on every rank if it is called on
        one alone. Two small all-reduces.
        """
        self._runtime.meet("calls clip_grad_norm_()")
        norm = nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type, error_if_nonfinite)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm  # of no gradients

    def gather_full_params(self) -> dict[str, torch.Tensor]:
        """Return all parameters whole, on every rank, in the model's own dtype; tied ones under each of their names.

        Costs one all-gather per parameter, and memory for the whole model.
        """
        self._runtime.meet("calls gather_full_params()")
        named = self.named_parameters(remove_duplicate=False)
        return {name: each.detach().full_tensor().view(self._shapes[each]) for name, each in named}

    def gather_full_grads(self) -> dict[str, torch.Tensor | None]:
        """Return the shards' gradients whole, on every rank, after `sync_gradients`; None where there is none."""
        self._runtime.meet("calls gather_full_grads()")
        whole: dict[str, torch.Tensor | None] = {}
        for name, each in self.named_parameters(remove_duplicate=False):
            whole[name] = None if each.grad is None else each.grad.full_tensor().view(self._shapes[each])
        return whole

    def save(
        self, folder: str | os.PathLike, optimizer: torch.optim.Optimizer | None = None, extra: Any = None
    ) -> None:
        """Write the model, and the optimizer's state, to a folder on a file system that all ranks share.

        Every rank calls it and writes its own shards, through torch.distributed.checkpoint. `extra`: what can be
        pickled, the first rank's, that `load` returns. An older checkpoint in the folder is replaced when the new one
        is complete: however a save ends, one of them is there. Raises OSError or ValueError on every rank where it
        can't be done.
        """
        self._runtime.meet("calls save()")
        checkpoint.save(self, folder, optimizer, extra, self.group)

    def load(self, folder: str | os.PathLike, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Load what `save` has written, on any number of ranks; return the `extra` of it. Every rank calls it.

        Gradients stay, as under torch. Raises FileNotFoundError on every rank if there is no checkpoint, and ValueError
        if it is of another model or optimizer, or was cut short; model and optimizer are then as before, unless the
        message says otherwise.
        """
        self._runtime.meet("calls load()")
        return checkpoint.load(self, folder, optimizer, self.group)

    # As a module under `fully_shard`: between passes it holds its shards, also units that were kept for backward

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """This module, and those inside of the wrapped one under their own names: so are all parameters."""
        self._runtime.rest()
        return super().named_modules(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the model's state dict: this rank's shards as DTensors on the model's memory. No communication."""
        return self.module.state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any) -> None:
        """Called by `load_state_dict()`, also of a module that holds this one. Every rank calls that."""
        self.module._load_from_state_dict(*args)

    def train(self, mode: bool = True) -> "FSDP":
        """Put the wrapped model into training mode, or with False into evaluation mode."""
        self.module.train(mode)
        return super().train(mode)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            "an FSDP can't be pickled or copied, since each rank holds shards that belong to a group of ranks: save it "
            "with save() or state_dict(), and load that into a new FSDP of the same model"
        )
