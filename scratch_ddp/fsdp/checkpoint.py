"""What is saved of a sharded model and its optimizer, and loaded on any number of ranks.

Between passes the model holds DTensors under its own names, and the optimizer's state is made of DTensors too. A
DTensor knows the whole tensor's shape and which rows of it are here: torch.distributed.checkpoint writes and reads them
rank by rank, and on another number of ranks reads other rows.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor import empty as empty_dtensor
from torch.optim import Optimizer

from scratch_ddp.common import checkpoint
from scratch_ddp.common.agreement import raise_everywhere

MODEL, OPTIMIZER = "model.", "optimizer."  # what the names of their tensors begin with
Group = dist.ProcessGroup | None


def collect(model: nn.Module, optimizer: Optimizer | None, extra: Any, group: Group) -> tuple[dict, dict]:
    """Return what `save` writes: tensors, which share the model's memory, and all that is not a tensor.

    Every rank calls it. Raises ValueError on every rank if the optimizer's state can't be saved.
    """
    state = {MODEL + name: value for name, value in model.state_dict().items()}
    groups, problem, names = None, None, _names(model)
    if optimizer is not None:
        groups = _groups(optimizer, names)
        if any(None in group["params"] for group in groups):
            problem = "the optimizer holds a parameter that is none of the parameters() here"
        else:
            for parameter, entries in optimizer.state.items():
                state |= {f"{OPTIMIZER}{names[parameter]}.{key}": value for key, value in entries.items()}
        if wrong := next((key for key in state if isinstance(state[key], (list, dict)) and OPTIMIZER in key), None):
            problem = f"the optimizer's state has a list or dict, which can't be saved: {wrong}"
    raise_everywhere(problem, group)
    tensors = {key: value.detach() for key, value in state.items() if isinstance(value, torch.Tensor)}
    values = {key: value for key, value in state.items() if key not in tensors}
    return tensors, {"values": values, "groups": groups, "extra": extra}


def save(model: nn.Module, folder: str | os.PathLike, optimizer: Optimizer | None, extra: Any, group: Group) -> None:
    """Write the model, the optimizer's state and `extra`. See `FSDP.save`."""
    checkpoint.write(folder, *collect(model, optimizer, extra, group), group)


def load(model: nn.Module, folder: str | os.PathLike, optimizer: Optimizer | None, group: Group) -> Any:
    """Load what `save` has written; return the `extra` of it. See `FSDP.load`."""
    folder, metadata = checkpoint.read_metadata(folder, group)
    others = checkpoint.read_others(folder, metadata, group)
    tensors = [each for each in metadata.state_dict_metadata.items() if isinstance(each[1], TensorStorageMetadata)]
    saved = {key: (entry.size, entry.properties.dtype) for key, entry in tensors}
    saved |= dict.fromkeys(others["values"])
    mine = {MODEL + name: value for name, value in model.state_dict().items()}
    problem, groups = None, others["groups"]
    if odd := {key for key in saved if key.startswith(MODEL)} ^ mine.keys():
        problem = f"the checkpoint is of another model: one of them lacks {min(odd).removeprefix(MODEL)!r}"
    if optimizer is not None:
        here = [each["params"] for each in _groups(optimizer, _names(model))]
        if groups is None:
            problem = problem or "the checkpoint was saved without an optimizer"
        elif [each["params"] for each in groups] != here:
            problem = problem or "the checkpoint is of another optimizer, with other parameters or other groups"
    raise_everywhere(problem, group)
    states = {}
    if optimizer is not None:
        states = {key: _room(key, *fact, model) for key, fact in saved.items() if fact and key.startswith(OPTIMIZER)}
    tensors = {key: value for key, value in mine.items() if isinstance(value, torch.Tensor)}
    checkpoint.read(folder, tensors | states, group)
    mine |= others["values"]
    model.load_state_dict({key.removeprefix(MODEL): value for key, value in mine.items() if key.startswith(MODEL)})
    if optimizer is not None:
        numbers = {name: number for number, name in enumerate(name for each in groups for name in each["params"])}
        numbered: dict[int, dict[str, Any]] = {}
        for key, value in (others["values"] | states).items():
            if key.startswith(OPTIMIZER):
                name, _, entry = key.removeprefix(OPTIMIZER).rpartition(".")
                numbered.setdefault(numbers[name], {})[entry] = value
        groups = [{**each, "params": [numbers[name] for name in each["params"]]} for each in groups]
        optimizer.load_state_dict({"state": numbered, "param_groups": groups})
    return others["extra"]


def full_state(model: nn.Module) -> dict[str, Any]:
    """Return, on the first rank, the state dict of the whole model in main memory; an empty one elsewhere."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def load_full_state(model: nn.Module, state: Mapping[str, Any] | None) -> None:
    """Give every rank its rows of the first rank's `state`, the state dict of a whole model."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(state or {}), options=options)


def as_rows(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """The state dict with DTensors in place of whole tensors where the model holds a DTensor. No communication."""
    mine, rows = model.state_dict(), {}
    for key, value in state.items():
        own = mine.get(key)
        if isinstance(own, DTensor) and isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            value = value.reshape(own.shape) if value.dim() == 0 else value
            if value.shape == own.shape:
                value = distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)
        rows[key] = value
    return rows


def _names(model: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _groups(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> list[dict[str, Any]]:
    """The optimizer's groups, with the parameters' names in place of parameters; None for one that has none."""
    return [{**group, "params": [names.get(each) for each in group["params"]]} for group in optimizer.param_groups]


def _room(key: str, shape: torch.Size, dtype: torch.dtype, model: nn.Module) -> torch.Tensor:
    """A tensor for a part of the optimizer's state: cut as its parameter is if it has that shape, else whole."""
    name = key.removeprefix(OPTIMIZER).rpartition(".")[0]
    parameter = model.get_parameter(name)
    if parameter.shape == shape:
        return torch.empty_like(parameter.detach(), dtype=dtype)
    if not shape:
        return torch.empty(shape, dtype=dtype)
    mesh = parameter.device_mesh
    return empty_dtensor(shape, dtype=dtype, device_mesh=mesh, placements=[Replicate()] * mesh.ndim)
