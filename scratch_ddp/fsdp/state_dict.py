"""State dicts of a sharded model: of the whole model on the first rank, or of each rank's shards as DTensors.

A DTensor knows the whole tensor's shape and which rows of it are here. torch.distributed.checkpoint writes and reads
them rank by rank, and on another number of ranks reads other rows.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from scratch_ddp.common.accounting import set_up
from scratch_ddp.common.agreement import raise_everywhere
from scratch_ddp.common.replicas import broadcast_from_first
from scratch_ddp.fsdp.units import ShardedModel

State = dict[str, torch.Tensor]
Fact = tuple[torch.Size, torch.dtype]  # of a tensor


def full_state(model: ShardedModel) -> State:
    """Return, on the first rank, the state dict of the whole model in main memory; an empty one elsewhere.

    One all-gather per unit, and no more than a unit in memory on the other ranks.
    """
    first = dist.get_rank(model.group) == 0
    full = {name: master.detach().cpu().clone() for name, master in model.replicated.masters.items()}
    for shards in model.shards:
        full |= {name: tensor.cpu() for name, tensor in shards.gather_full(shards.masters, keep=first).items()}
    if not first:
        return {}
    return {key: each.detach().cpu().clone() if name is None else full[name] for key, name, each in _entries(model)}


def load_full_state(model: ShardedModel, state: State | str | os.PathLike | None) -> None:
    """Give every rank its rows of the first rank's `state`, the state dict of a whole model or the path of one.

    Raises ValueError on every rank if it can't be read or is not this model's. One broadcast per unit.
    """
    problem, first = None, dist.get_rank(model.group) == 0
    if first:
        state, problem = _read(state)
        problem = problem or difference({key: (each.shape, each.dtype) for key, each in state.items()}, _facts(model))
    raise_everywhere(problem, model.group)
    replicated = model.replicated.masters
    with set_up():
        for shards in model.shards:
            shards.scatter_full(state if first else None)
        if first:
            for name, master in replicated.items():
                master.data.copy_(state[name])
            for key, name, tensor in _entries(model):
                if name is None:
                    tensor.copy_(state[key])
        broadcast_from_first([*replicated.values(), *model.module.buffers()], model.group)
    model.buffers.remember()
    model.mark_loaded()


def write_full_state(path: str | os.PathLike, state: State, group: dist.ProcessGroup | None) -> None:
    """Write the first rank's state dict to a file. An older file is replaced when the new one is complete."""
    path, problem = Path(path), None
    if dist.get_rank(group) == 0:
        partial = path.with_name(path.name + ".partial")
        try:
            with open(partial, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except (OSError, RuntimeError) as error:
            problem = f"{path} can't be written: {error}"
            with contextlib.suppress(OSError):
                partial.unlink()
    raise_everywhere(problem, group, OSError)


def sharded_state(model: ShardedModel) -> State:
    """Return the state dict with the shards as DTensors, and the rest whole; all of it in the model's own memory.

    No communication.
    """
    dtensors, masters = DTensors(model), model.masters()
    return {
        key: each.detach() if name is None else dtensors.make(name, masters[name])
        for key, name, each in _entries(model)
    }


def load_sharded_state(
    model: ShardedModel, state: Mapping[str, Any], strict: bool = True
) -> tuple[list[str], list[str]]:
    """Load what `sharded_state` returned on this rank, or whole tensors; return what is missing, what is unexpected.

    Raises ValueError on every rank where a tensor does not fit, or, with `strict`, is missing or unexpected.
    """
    mine = sharded_state(model)
    missing, unexpected = [key for key in mine if key not in state], [key for key in state if key not in mine]
    if not strict:
        mine = {key: tensor for key, tensor in mine.items() if key in state}
        state = {key: state[key] for key in mine}
    rows = {key: _rows_here(given, mine.get(key)) for key, given in state.items()}
    raise_everywhere(_difference_of_shards(rows, mine), model.group)
    with torch.no_grad():
        for key, tensor in mine.items():
            _local(tensor).copy_(rows[key])
    model.mark_loaded()
    return missing, unexpected


class DTensors:
    """Makes DTensors of tensors that are shaped like the shards of a model."""

    def __init__(self, model: ShardedModel):
        self.shapes = {
            name: rows.shape or torch.Size([1])  # a scalar counts as a row
            for shards in model.shards
            for name, rows in shards.rows.items()
        }
        kind = model.shards[0].part.device.type if model.shards else "cpu"
        self._mesh, self._placements = model.ranks.mesh, [Replicate(), Shard(0)]
        if self._mesh is None:
            self._mesh, self._placements = DeviceMesh.from_group(model.group or dist.group.WORLD, kind), [Shard(0)]

    def make(self, name: str, mine: torch.Tensor) -> torch.Tensor:
        """This rank's rows of what belongs to the parameter `name`, as a DTensor on the same memory."""
        shape = self.shapes.get(name)
        if shape is None:  # not sharded
            return mine.detach()
        stride = torch.empty(shape, device="meta").stride()
        whole = {"run_check": False, "shape": shape, "stride": stride}
        return DTensor.from_local(mine.detach(), self._mesh, self._placements, **whole)


def difference(there: Mapping[str, Fact], here: Mapping[str, Fact]) -> str | None:
    """Say how what was saved differs in names, shapes or dtypes from what is here, or return None if it fits."""
    if problem := _difference_of_names(there, here):
        return f"the checkpoint is of another model: it {problem}"
    for key, (shape, dtype) in here.items():
        if tuple(there[key][0]) != tuple(shape):
            shapes = f"{tuple(there[key][0])} there and {tuple(shape)} here"
            return f"the checkpoint is of another model: {key!r} has the shape {shapes}"
        if there[key][1] != dtype:
            return f"the checkpoint is of another dtype: {key!r} is {there[key][1]} there and {dtype} here"
    return None


def _difference_of_shards(there: Mapping[str, Any], here: State) -> str | None:
    if problem := _difference_of_names(there, here):
        return f"the state dict is of another model: it {problem}"
    for key, tensor in here.items():
        mine, other = _local(tensor), there[key]
        if (mine.shape, mine.dtype) != (other.shape, other.dtype):
            shards = f"{other.dtype} {tuple(other.shape)}, here {mine.dtype} {tuple(mine.shape)}"
            return f"{key!r} is {shards}; whole tensors of the same model can be loaded too"
    return None


def _difference_of_names(there: Iterable[str], here: Iterable[str]) -> str | None:
    if missing := next((key for key in here if key not in there), None):
        return f"lacks {missing!r}"
    if unknown := next((key for key in there if key not in here), None):
        return f"has {unknown!r}, which this one lacks"
    return None


def _entries(model: ShardedModel) -> Iterator[tuple[str, str | None, torch.Tensor]]:
    """Parameters and persistent buffers with their names in `module.state_dict()`, in its order, tied ones each time.

    In between: the parameter's first name, None for a buffer.
    """
    for path, module in model.module.named_modules(remove_duplicate=False):
        persistent = module._buffers.keys() - module._non_persistent_buffers_set
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and (name in module._parameters or name in persistent):
                key = f"{path}.{name}".lstrip(".")
                yield key, model.first_names[key] if name in module._parameters else None, tensor


def _facts(model: ShardedModel) -> dict[str, Fact]:
    """Shapes and dtypes as they are saved: a parameter's own dtype, not the one it is computed in."""
    masters = model.masters()
    return {
        key: (each.shape, each.dtype if name is None else masters[name].dtype) for key, name, each in _entries(model)
    }


def _read(state: Any) -> tuple[Any, str | None]:
    """Return a state dict, and what is wrong with it."""
    if isinstance(state, (str, os.PathLike)):
        try:
            state = torch.load(state, map_location="cpu", weights_only=True)
        except Exception as error:  # torch's readers raise many kinds for a file that was cut short
            why = f"{type(error).__name__}: {error}"
            return None, f"{state} can't be read; it is no state dict, or was cut short: {why}"
    if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        return None, f"the first rank must pass a state dict or the path of one, not {type(state).__name__}"
    return state, None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _rows_here(given: torch.Tensor, mine: torch.Tensor | None) -> torch.Tensor:
    """This rank's rows of a DTensor, or of a whole tensor where `mine` is a DTensor; other tensors as they are."""
    whole = given.reshape(1) if isinstance(mine, DTensor) and given.dim() == 0 else given
    if isinstance(mine, DTensor) and not isinstance(given, DTensor) and whole.shape == mine.shape:
        given = distribute_tensor(whole, mine.device_mesh, mine.placements, src_data_rank=None)  # no communication
    return _local(given)
