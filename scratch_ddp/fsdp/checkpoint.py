"""What is saved of a sharded model and its optimizer, and loaded on any number of ranks.

Between passes the model holds DTensors under its own names, and the optimizer's state is made of DTensors too. A
DTensor knows the whole tensor's shape and which rows of it are here: torch.distributed.checkpoint writes and reads them
rank by rank, and on another number of ranks reads other rows.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from scratch_ddp.common import checkpoint
from scratch_ddp.common.agreement import raise_everywhere

MODEL, OPTIMIZER = "model.", "optimizer."  # what the names of their tensors begin with
Group = dist.ProcessGroup | None


def save(model: nn.Module, folder: str | os.PathLike, optimizer: Optimizer | None, extra: Any, group: Group) -> None:
    """Write the model, the optimizer's state and `extra`. See `FSDP.save`."""
    state = {MODEL + name: value for name, value in model.state_dict().items()}
    groups, problem, names = None, None, _names(model)
    if optimizer is not None:
        groups = _groups(optimizer, names)
        if any(None in each["params"] for each in groups):
            problem = "the optimizer holds a parameter that is none of the parameters() here"
        for parameter, entries in optimizer.state.items():
            state |= {f"{OPTIMIZER}{names.get(parameter)}.{key}": value for key, value in entries.items()}
            if lists := [key for key, value in entries.items() if isinstance(value, (list, dict))]:
                problem = f"the optimizer's state has a list or dict, which can't be saved: {lists[0]}"
    raise_everywhere(problem, group)
    tensors = {key: value.detach() for key, value in state.items() if isinstance(value, torch.Tensor)}
    values = {key: value for key, value in state.items() if key not in tensors}
    checkpoint.write(folder, tensors, {"values": values, "groups": groups, "extra": extra}, group)


def load(model: nn.Module, folder: str | os.PathLike, optimizer: Optimizer | None, group: Group) -> Any:
    """Load what `save` has written; return the `extra` of it. See `FSDP.load`."""
    folder, metadata = checkpoint.read_metadata(folder, group)
    others = checkpoint.read_others(folder, group)
    entries = metadata.state_dict_metadata.items()
    saved = {key: entry for key, entry in entries if isinstance(entry, TensorStorageMetadata)}
    state = {MODEL + name: value for name, value in model.state_dict().items()}
    groups, problem = others["groups"], None
    if odd := {key for key in (*saved, *others["values"]) if key.startswith(MODEL)} ^ state.keys():
        problem = f"the checkpoint is of another model: one of them lacks {min(odd).removeprefix(MODEL)!r}"
    elif optimizer is not None and groups is None:
        problem = "the checkpoint was saved without an optimizer"
    elif optimizer is not None:
        here = [each["params"] for each in _groups(optimizer, _names(model))]
        if [each["params"] for each in groups] != here:
            problem = "the checkpoint is of another optimizer, with other parameters or other groups"
    raise_everywhere(problem, group)
    if optimizer is not None:
        state |= {key: _room(key, entry, model) for key, entry in saved.items() if key.startswith(OPTIMIZER)}
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    checkpoint.read(folder, tensors, group)
    state |= others["values"]
    model.load_state_dict({key.removeprefix(MODEL): value for key, value in state.items() if key.startswith(MODEL)})
    if optimizer is not None:
        numbers = {name: number for number, name in enumerate(name for each in groups for name in each["params"])}
        numbered: dict[int, dict[str, Any]] = {}
        for key in filter(lambda key: key.startswith(OPTIMIZER), state):
            name, _, entry = key.removeprefix(OPTIMIZER).rpartition(".")
            numbered.setdefault(numbers[name], {})[entry] = state[key]
        groups = [{**each, "params": [numbers[name] for name in each["params"]]} for each in groups]
        optimizer.load_state_dict({"state": numbered, "param_groups": groups})
    return others["extra"]


def _names(model: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _groups(optimizer: Optimizer, names: dict[nn.Parameter, str]) -> list[dict[str, Any]]:
    """The optimizer's groups, with the parameters' names in place of parameters; None for one that has none."""
    return [{**group, "params": [names.get(each) for each in group["params"]]} for group in optimizer.param_groups]


def _room(key: str, saved: TensorStorageMetadata, model: nn.Module) -> torch.Tensor:
    """A tensor for a part of the optimizer's state: cut as its parameter is if it has that shape, else whole."""
    parameter = model.get_parameter(key.removeprefix(OPTIMIZER).rpartition(".")[0])
    if saved.size == parameter.shape:
        return torch.empty_like(parameter.detach(), dtype=saved.properties.dtype)
    return torch.empty(saved.size, dtype=saved.properties.dtype)
