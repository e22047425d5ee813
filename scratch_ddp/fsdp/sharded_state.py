"""Shards as DTensors, which know the whole tensor's shape and which rows of it are here.

torch.distributed.checkpoint writes and reads them rank by rank, and to other rows on another number of ranks.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from scratch_ddp.common.agreement import raise_everywhere
from scratch_ddp.fsdp.parts import Parts
from scratch_ddp.fsdp.state_dict import entries


class Whole:
    """Makes DTensors of tensors that are shaped like the shards of a model."""

    def __init__(self, parts: Parts, group: dist.ProcessGroup | None):
        shards = list(parts.shards)
        self.shapes = {
            name: rows.shape if rows.shape else torch.Size([1])  # a scalar counts as a row
            for each in shards
            for name, rows in zip(each.names, each.rows, strict=True)
        }
        kind = shards[0].part.device.type if shards else "cpu"
        self.mesh = DeviceMesh.from_group(group or dist.group.WORLD, kind)

    def of(self, name: str, mine: torch.Tensor) -> torch.Tensor:
        """This rank's rows of what belongs to the parameter `name` as a DTensor on the same memory."""
        shape = self.shapes.get(name)
        if shape is None:  # not sharded
            return mine.detach()
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(mine.detach(), self.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def sharded_state(model: nn.Module, parts: Parts, group: dist.ProcessGroup | None) -> dict[str, torch.Tensor]:
    """Return the state dict with the shards as DTensors, and the rest whole; all of it on the model's own memory.

    No communication.
    """
    whole, masters = Whole(parts, group), parts.masters()
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        key: whole.of(names[each], masters[names[each]]) if each in names else each.detach()
        for key, each in entries(model)
    }


def load_sharded_state(
    mine: Mapping[str, torch.Tensor], state: Mapping[str, Any], group: dist.ProcessGroup | None
) -> None:
    """Copy a state dict with this rank's shards into `mine`. Raises ValueError on every rank where one does not fit."""
    raise_everywhere(_why_not(mine, state), group)
    with torch.no_grad():
        for key, tensor in mine.items():
            _local(tensor).copy_(_local(state[key]))


def _why_not(mine: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> str | None:
    if missing := next((key for key in mine if key not in state), None):
        return f"the state dict is of another model: it lacks {missing!r}"
    if unknown := next((key for key in state if key not in mine), None):
        return f"the state dict is of another model: it has {unknown!r}, which this one lacks"
    for key, tensor in mine.items():
        here, there = _local(tensor), _local(state[key])
        if (here.shape, here.dtype) != (there.shape, there.dtype):
            shards = f"{there.dtype} {tuple(there.shape)}, here {here.dtype} {tuple(here.shape)}"
            return f"{key!r} is {shards}; a whole model's state is loaded with load_full_state_dict()"
    return None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
