"""From a model to its units: each rank keeps its rows of the first rank's values, one unit after the other."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.common.accounting import set_up
from scratch_ddp.common.agreement import gather_rows, message_device
from scratch_ddp.common.replicas import Buffers, broadcast_from_first, named_tensors
from scratch_ddp.fsdp.full import spread_rows_of
from scratch_ddp.fsdp.meta_init import Init, initialise, replace_meta
from scratch_ddp.fsdp.parts import Parts
from scratch_ddp.fsdp.plan import Named, Partition
from scratch_ddp.fsdp.replicated import Replicated
from scratch_ddp.fsdp.shards import Shards
from scratch_ddp.fsdp.units import Unit


def assemble(
    plan: Partition,
    model: nn.Module,
    group: dist.ProcessGroup | None,
    compute_dtype: torch.dtype | None,
    init: Init | None,
    device: torch.device | None,
) -> Parts:
    """Return the parts of the model, and leave the model itself with freed parameters.

    Values are the first rank's: one broadcast a unit. What is on the meta device there is made by `init`, on every rank
    alike, one module at a time. Raises ValueError on every rank where values are missing.
    """
    with set_up():
        unset = _on_meta_at_first_rank(model, group)
        replaced = replace_meta(model, device or message_device(group))
        unset = {replaced.get(tensor, tensor) for tensor in unset}
        units = []
        for unit, named in plan.parameters.items():
            named = {name: replaced.get(parameter, parameter) for name, parameter in named.items()}
            shards = [Shards(alike, group, dtype) for alike, dtype in _alike(named, compute_dtype)]
            for each in shards:
                if not unset.issuperset(each.parameters):
                    values = {n: p for n, p in zip(each.names, each.parameters, strict=True) if p not in unset}
                    spread_rows_of(each, values if each.rank == 0 else None)
                each.attach()
            units.append(Unit(unit, plan.modules[unit], shards))
        replicated = {name: replaced.get(parameter, parameter) for name, parameter in plan.replicated.items()}
        initialise(model, unset, [each for unit in units for each in unit.shards], init, group)
        broadcast_from_first([*replicated.values(), *model.buffers()], group)
    return Parts(units, Replicated(replicated, group, compute_dtype), Buffers(model, group))


def _on_meta_at_first_rank(model: nn.Module, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """The parameters and buffers for which the first rank has no values."""
    tensors = [tensor for _, tensor in named_tensors(model)]
    row = torch.tensor([tensor.is_meta for tensor in tensors], dtype=torch.uint8)
    first = gather_rows(row, group)[0].tolist() if tensors else []
    return [tensor for tensor, is_meta in zip(tensors, first, strict=True) if is_meta]


def _alike(named: Named, compute_dtype: torch.dtype | None) -> Iterator[tuple[Named, torch.dtype]]:
    """Parameters of one dtype and device, which can share a message, and the dtype they are computed in."""
    groups: dict[tuple[torch.dtype, torch.device], Named] = {}
    for name, parameter in named.items():
        groups.setdefault((parameter.dtype, parameter.device), {})[name] = parameter
    for (dtype, _), alike in groups.items():
        yield alike, compute_dtype if compute_dtype is not None and dtype.is_floating_point else dtype
