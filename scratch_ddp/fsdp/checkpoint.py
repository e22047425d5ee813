"""Checkpoints in a folder: each rank writes its own shards and its share of the optimizer's state.

An optimizer's state is saved under the names of the parameters, so that it fits any number of ranks.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from scratch_ddp.common import checkpoint
from scratch_ddp.common.agreement import check_same_lines, raise_everywhere
from scratch_ddp.fsdp.state_dict import DTensors, State, difference, sharded_state
from scratch_ddp.fsdp.units import ShardedModel

MODEL, OPTIMIZER = "model.", "optimizer."  # what the names of their tensors begin with
SHARDED, REPLICATED = "sharded", "replicated"  # how a tensor of the state is saved; other values are saved as they are


def save(model: ShardedModel, folder: str | os.PathLike, optimizer: torch.optim.Optimizer | None, extra: Any) -> None:
    """Write the model, the optimizer's state and `extra`. See `FSDP.save`."""
    checkpoint.write(folder, *collect(model, optimizer, extra), model.group)


def collect(model: ShardedModel, optimizer: torch.optim.Optimizer | None, extra: Any) -> tuple[State, dict[str, Any]]:
    """Return what `save` writes: tensors, which share the model's memory, and all that is not a tensor.

    Every rank calls it. Raises ValueError on every rank if the optimizer's state can't be saved.
    """
    tensors = {MODEL + key: tensor for key, tensor in sharded_state(model).items()}
    described = problem = None
    if optimizer is not None:
        try:
            state, described = _describe(optimizer, model.masters(), DTensors(model))
            tensors |= state
        except ValueError as error:
            problem = str(error)
    raise_everywhere(problem, model.group)
    check_same_lines(sorted(tensors), "the ranks' optimizers differ", model.group)
    return tensors, {"optimizer": described, "extra": extra}


def load(model: ShardedModel, folder: str | os.PathLike, optimizer: torch.optim.Optimizer | None) -> Any:
    """Load what `save` has written; return the `extra` of it. See `FSDP.load`."""
    folder, metadata = checkpoint.read_metadata(folder, model.group)
    saved = metadata.state_dict_metadata
    mine = sharded_state(model)
    facts = {key: (entry.size, entry.properties.dtype) for key, entry in saved.items() if key.startswith(MODEL)}
    facts = {key.removeprefix(MODEL): fact for key, fact in facts.items()}
    raise_everywhere(difference(facts, {key: (each.shape, each.dtype) for key, each in mine.items()}), model.group)
    others = checkpoint.read_others(folder, metadata, model.group)
    tensors, states = {MODEL + key: tensor for key, tensor in mine.items()}, {}
    if optimizer is not None:
        problem = None
        try:
            room, states = _make_room(optimizer, model.masters(), DTensors(model), others["optimizer"], saved)
            tensors |= room
        except ValueError as error:
            problem = str(error)
        raise_everywhere(problem, model.group)
    checkpoint.read(folder, tensors, model.group)
    if optimizer is not None:
        _restore(optimizer, states, others["optimizer"]["groups"])
    model.buffers.remember()
    model.mark_loaded()
    return others["extra"]


def _describe(
    optimizer: torch.optim.Optimizer, masters: Mapping[str, nn.Parameter], dtensors: DTensors
) -> tuple[State, dict[str, Any]]:
    """Return the optimizer's tensors by their names in a checkpoint, and what else has to be saved.

    A tensor with its master's shape holds this rank's rows of the state. Raises ValueError for other tensors with
    dimensions, whose rows are unknown, and for parameters that are not the model's.
    """
    names = _names(optimizer, masters)
    tensors: State = {}
    kinds: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        name = names[parameter]
        kinds[name] = {}
        for key, value in state.items():
            kinds[name][key] = _kind(name, key, value, parameter, name in dtensors.shapes)
            if kinds[name][key] == SHARDED:
                tensors[f"{OPTIMIZER}{name}.{key}"] = dtensors.make(name, value)
            elif kinds[name][key] == REPLICATED:
                tensors[f"{OPTIMIZER}{name}.{key}"] = value.detach()
    return tensors, {"kinds": kinds, "groups": _groups(optimizer, names)}


def _make_room(
    optimizer: torch.optim.Optimizer,
    masters: Mapping[str, nn.Parameter],
    dtensors: DTensors,
    described: Any,
    saved: Mapping[str, Any],
) -> tuple[State, dict[nn.Parameter, dict[str, Any]]]:
    """Return tensors for what was saved, by their names in the checkpoint, and the state that they make up.

    Raises ValueError if it is another optimizer's state.
    """
    names = _names(optimizer, masters)
    if described is None:
        raise ValueError("the checkpoint was saved without an optimizer")
    _check_same_parameters(described["groups"], _groups(optimizer, names))
    tensors: State = {}
    states: dict[nn.Parameter, dict[str, Any]] = {}
    for name, kinds in described["kinds"].items():
        master = masters[name]
        states[master] = state = dict(kinds)  # what is not a tensor remains
        for key, kind in kinds.items():
            if kind in (SHARDED, REPLICATED):
                entry = saved[f"{OPTIMIZER}{name}.{key}"]
                shape, device = (master.shape, master.device) if kind == SHARDED else (entry.size, "cpu")
                state[key] = torch.empty(shape, dtype=entry.properties.dtype, device=device)
                whole = dtensors.make(name, state[key]) if kind == SHARDED else state[key]
                tensors[f"{OPTIMIZER}{name}.{key}"] = whole
    return tensors, states


def _restore(optimizer: torch.optim.Optimizer, states: dict[nn.Parameter, dict[str, Any]], groups: list[dict]) -> None:
    """Give the optimizer its state and settings."""
    for parameter, state in states.items():
        optimizer.state[parameter] = state
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})


def _names(optimizer: torch.optim.Optimizer, masters: Mapping[str, nn.Parameter]) -> dict[nn.Parameter, str]:
    names = {master: name for name, master in masters.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                shape = tuple(parameter.shape)
                raise ValueError(
                    f"the optimizer holds a parameter of shape {shape} that is none of the parameters() here"
                )
    return names


def _groups(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> list[dict[str, Any]]:
    """The optimizer's groups, with the parameters' names in place of parameters."""
    return [{**group, "params": [names[each] for each in group["params"]]} for group in optimizer.param_groups]


def _check_same_parameters(there: list[dict[str, Any]], here: list[dict[str, Any]]) -> None:
    there, here = [group["params"] for group in there], [group["params"] for group in here]
    if there == here:
        return
    pairs = [(a, b) for one, other in zip(there, here, strict=False) for a, b in zip(one, other, strict=False)]
    wrong = next((f"{a!r} where this one has {b!r}" for a, b in pairs if a != b), None)
    sizes = f"groups of {[len(each) for each in there]} parameters, this one has {[len(each) for each in here]}"
    raise ValueError(f"the checkpoint is of another optimizer: it has {wrong or sizes}")


def _kind(name: str, key: str, value: Any, parameter: nn.Parameter, sharded: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if sharded and value.shape == parameter.shape:
        return SHARDED
    if not sharded or value.dim() == 0:
        return REPLICATED
    raise ValueError(
        f"the optimizer's {key!r} of {name!r} is not shaped like its shard: it fits this number of ranks only"
    )
