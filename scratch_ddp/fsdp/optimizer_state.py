"""An optimizer's state by the names of the parameters, so that it fits any number of ranks."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from scratch_ddp.fsdp.sharded_state import Whole

PREFIX = "optimizer."
SHARDED, REPLICATED = "sharded", "replicated"  # how a tensor of the state is saved; other values are saved as they are
Tensors = dict[str, torch.Tensor]


def describe(
    optimizer: torch.optim.Optimizer, masters: Mapping[str, nn.Parameter], whole: Whole
) -> tuple[Tensors, dict[str, Any]]:
    """Return the optimizer's tensors by what they are called in a checkpoint, and what else has to be saved.

    Tensors with their shard's shape are its rows of the whole parameter's. Raises ValueError for other tensors with
    dimensions, whose rows nobody could tell, and for parameters that are not the model's.
    """
    names = _names(optimizer, masters)
    tensors: Tensors = {}
    kinds: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        name = names[parameter]
        kinds[name] = {}
        for key, value in state.items():
            kinds[name][key] = _kind(name, key, value, parameter, name in whole.shapes)
            if kinds[name][key] == SHARDED:
                tensors[f"{PREFIX}{name}.{key}"] = whole.of(name, value)
            elif kinds[name][key] == REPLICATED:
                tensors[f"{PREFIX}{name}.{key}"] = value.detach()
    groups = [
        {**group, "params": [names[parameter] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    return tensors, {"kinds": kinds, "groups": groups}


def make_room(
    optimizer: torch.optim.Optimizer, masters: Mapping[str, nn.Parameter], whole: Whole, described: Any, saved: Mapping
) -> tuple[Tensors, dict[nn.Parameter, dict[str, Any]]]:
    """Return tensors for what was saved, by their names in the checkpoint, and the state that they make up.

    Raises ValueError if it is another optimizer's state.
    """
    names = _names(optimizer, masters)
    if described is None:
        raise ValueError("the checkpoint was saved without an optimizer")
    here = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    there = [group["params"] for group in described["groups"]]
    if here != there:
        pairs = [(a, b) for one, other in zip(there, here, strict=False) for a, b in zip(one, other, strict=False)]
        wrong = next((f"{a!r} where this one has {b!r}" for a, b in pairs if a != b), None)
        sizes = f"groups of {[len(each) for each in there]} parameters, this one has {[len(each) for each in here]}"
        raise ValueError(f"the checkpoint is of another optimizer: it has {wrong or sizes}")
    tensors: Tensors = {}
    states: dict[nn.Parameter, dict[str, Any]] = {}
    for name, kinds in described["kinds"].items():
        states[masters[name]] = state = {}
        for key, kind in kinds.items():
            state[key] = kind
            if kind in (SHARDED, REPLICATED):
                entry = saved[f"{PREFIX}{name}.{key}"]
                shape = masters[name].shape if kind == SHARDED else entry.size
                place = masters[name].device if kind == SHARDED else "cpu"
                state[key] = torch.empty(shape, dtype=entry.properties.dtype, device=place)
                tensors[f"{PREFIX}{name}.{key}"] = whole.of(name, state[key]) if kind == SHARDED else state[key]
    return tensors, states


def restore(optimizer: torch.optim.Optimizer, states: dict[nn.Parameter, dict[str, Any]], groups: list[dict]) -> None:
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
