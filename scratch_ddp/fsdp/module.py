"""`FSDP`: a model whose parameters, gradients and optimizer state are shared out over the ranks."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from scratch_ddp.common.agreement import check_same_lines, message_device, raise_everywhere
from scratch_ddp.common.clip_grad import total_norm
from scratch_ddp.common.replicas import describe, model_problem
from scratch_ddp.common.wrapper import SyncSwitch, process_group
from scratch_ddp.fsdp.assembly import assemble
from scratch_ddp.fsdp.checkpoint import Saving
from scratch_ddp.fsdp.checks import Checks
from scratch_ddp.fsdp.desync import OTHERS, RollCall
from scratch_ddp.fsdp.freed_parameter import unmark
from scratch_ddp.fsdp.full import gather_rows_of
from scratch_ddp.fsdp.hooks import install
from scratch_ddp.fsdp.meta_init import Init
from scratch_ddp.fsdp.plan import Partition, Spec, partition
from scratch_ddp.fsdp.runtime import NUMBERS, Passes
from scratch_ddp.fsdp.synchronisation import Synchronisation, flags_of


class FSDP(Saving, SyncSwitch, nn.Module):
    """A model of which each rank holds a share of every parameter, and gathers one unit at a time to compute with it.

    `group`: a process group, a dimension of a mesh (`mesh["dp"]`), or None for the default group.
    `units`: the modules to be gathered one at a time, or their names or types; by default the elements of the model's
    outermost `nn.ModuleList`s and `nn.Sequential`s. All other parameters are the root's: gathered first, freed when
    backward is over.
    `compute_dtype`: units are gathered and computed, and gradients averaged, in this dtype (torch.bfloat16); shards,
    their gradients and optimizer state keep the model's. Floating-point inputs are converted.
    `replicated`: modules, types or names of parameters to be kept whole on every rank.
    `free_after_forward`: False keeps units between forward and backward: a third less communication, much more memory.
    `prefetch`: how many units ahead messages travel while others compute.
    `init(module)`: gives values to what is on the meta device (see `initialisation`), which then is on `device`.

    `parameters()` are the shards, under the model's own names: parameter of shape (d, …) on n ranks: ⌈d/n⌉ rows a rank,
    the last ranks fewer or none; a scalar is one row. An optimizer made from them, after wrapping, updates the model;
    one that looks at more than single elements (Adafactor, Muon, LBFGS) computes something else than on whole tensors.
    Values start as the first rank's. A model without parameters is wrapped too, and no unit travels.
    Raises ValueError on every rank if one rank can't be wrapped, or ranks differ.
    Cost: a pass gathers each unit with one all-gather, n-1 n-ths of its bytes sent by a rank, once in forward and once
    in backward; one reduce-scatter of as many bytes for its gradients; and a small all-reduce before each pass.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        units: Spec = None,
        compute_dtype: torch.dtype | None = None,
        *,
        replicated: Spec = (),
        free_after_forward: bool = True,
        prefetch: int = 1,
        init: Init | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.group = process_group(group)
        plan = self._agree_on_plan(model, units, replicated, compute_dtype, free_after_forward, prefetch)
        names = {parameter: name for name, parameter in model.named_parameters()}
        # Every name of a parameter, also where it is tied to another, and the first name of what it means.
        self._first_names = {name: names[each] for name, each in model.named_parameters(remove_duplicate=False)}
        device = torch.device(device) if device is not None else None
        self._parts = assemble(plan, model, self.group, compute_dtype, init, device)
        self.module = model
        checks, roll_call = Checks(model, self._parts, self), RollCall(self.group, NUMBERS + len(flags_of(self._parts)))
        self._passes = Passes(self._parts, roll_call, checks, prefetch, free_after_forward)
        self._synchronisation = Synchronisation(self._parts, self._passes)
        self.hook_handles = install(self._passes, compute_dtype)

    @property
    def world_size(self) -> int:
        """How many ranks share the model."""
        return dist.get_world_size(self.group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped model, which gathers its units as it comes to them. Every rank calls it alike."""
        return self.module(*args, **kwargs)

    def sync_gradients(self) -> None:
        """Leave in the shards' `.grad` this rank's rows of the gradients' mean over the ranks. Call it after backward.

        Does nothing under `no_sync()`. Most of it has happened during backward. Parameters that have no gradient on any
        rank keep theirs, None at first. Buffers that have changed on any rank become the first rank's. Costs one small
        all-reduce, and what could not be done in backward: a reduce-scatter for each unit that another forward pass
        needed first, one all-reduce a dtype for replicated parameters.
        """
        if self.do_sync:
            self._synchronisation.run()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The shards, and replicated parameters whole, under the model's own names (no "module.") and in its order."""
        masters = self._parts.masters()
        for name, first in self._first_names.items():
            if name == first or not remove_duplicate:
                yield f"{prefix}.{name}".lstrip("."), masters[first]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the shards' gradients, and whole ones that have accumulated without synchronisation."""
        for gradients in self._parts.gradients:
            gradients.finish()
            gradients.drop()
        super().zero_grad(set_to_none)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; return the norm before, a float64 scalar.

        As torch.nn.utils.clip_grad_norm_ on the whole gradients, the same on every rank; that function, on shards,
        would scale each rank's rows by something else. Call it after `sync_gradients`. One all-reduce of one number.
        """
        sharded = [each.grad for shards in self._parts.shards for each in shards.shards]
        replicated = [each.grad for each in self._parts.replicated.masters.values()]
        norm = total_norm(_existing(sharded), _existing(replicated), norm_type, message_device(self.group), self.group)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"the gradients' norm of order {norm_type} is {norm.item()}: they can't be clipped")
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0).item()
        for gradient in _existing([*sharded, *replicated]):
            gradient.mul_(scale)
        return norm

    def gather_full_params(self) -> dict[str, torch.Tensor]:
        """Return all parameters whole, on every rank, in the model's own dtype; tied ones under each of their names.

        Costs one all-gather a unit, and memory for the whole model.
        """
        return self._gather("gather_full_params()", lambda shard: shard)

    def gather_full_grads(self) -> dict[str, torch.Tensor | None]:
        """Return the shards' gradients whole, on every rank, after `sync_gradients`; None where there is none."""
        return self._gather("gather_full_grads()", lambda shard: shard.grad)

    def remove_hooks(self) -> None:
        """Make the wrapped model an ordinary module again, whole on every rank. One all-gather a unit."""
        self._passes.meet(OTHERS, ["remove_hooks()"])
        for handle in self.hook_handles:
            handle.remove()
        self.hook_handles.clear()
        for unit in self._parts.units:
            unit.use()
            for parameter in unit.parameters():
                unmark(parameter)

    def _gather(self, what: str, of: Callable[[nn.Parameter], torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
        masters = self._parts.masters()
        absent = [name for name, master in masters.items() if of(master) is None]
        self._passes.meet(OTHERS, [what, f"without {', '.join(absent)}"])
        whole = {name: of(master) for name, master in self._parts.replicated.masters.items()}
        whole = {name: None if tensor is None else tensor.detach().clone() for name, tensor in whole.items()}
        for shards in self._parts.shards:
            whole |= gather_rows_of(shards, [of(shard) for shard in shards.shards])
        return {name: whole[first] for name, first in self._first_names.items()}

    def _agree_on_plan(self, model, units, replicated, compute_dtype, free_after_forward, prefetch) -> Partition:
        """Check the constructor's arguments; raises on every rank what is wrong on any."""
        problem = model_problem(model, self.group, with_values=False) or _why_not_set(compute_dtype, prefetch)
        plan = None
        try:
            plan = problem or partition(model, units, replicated)
        except (TypeError, ValueError) as error:
            problem = str(error)
        raise_everywhere(problem, self.group)
        settings = f"compute_dtype {compute_dtype}, free_after_forward {free_after_forward}, prefetch {prefetch}"
        lines = [*describe(model), *plan.lines(), settings]
        check_same_lines(lines, "the ranks wrap different models; do the same everywhere", self.group)
        return plan


def _why_not_set(compute_dtype: Any, prefetch: Any) -> str | None:
    if compute_dtype is not None and not (isinstance(compute_dtype, torch.dtype) and compute_dtype.is_floating_point):
        return f"compute_dtype must be a floating-point dtype or None, not {compute_dtype!r}"
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        return f"prefetch must be a number of units, 0 or more, not {prefetch!r}"
    return None


def _existing(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor is not None]
