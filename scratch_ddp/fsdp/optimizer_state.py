"""An optimizer's state over shards, as its own `state_dict()` shows it: each rank's rows as DTensors.

So torch.distributed.checkpoint saves and loads it on any number of ranks, as it does the model's `state_dict()`. The
optimizer itself works on plain tensors.
"""

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from scratch_ddp.fsdp.state_dict import DTensors
from scratch_ddp.fsdp.units import ShardedModel


def show_rows_as_dtensors(optimizer: torch.optim.Optimizer, model: ShardedModel) -> None:
    """From now on the optimizer's `state_dict()` has DTensors, and `load_state_dict()` takes them. No communication."""
    reference = weakref.ref(model)

    def show(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        model = reference()
        return state_dict if model is None else {**state_dict, "state": _with_dtensors(optimizer, state_dict, model)}

    _keep_rows(optimizer)
    optimizer.register_state_dict_post_hook(show)
    optimizer.register_load_state_dict_post_hook(_keep_rows)


def _with_dtensors(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any], model: ShardedModel
) -> dict[int, dict[str, Any]]:
    """The state by numbers; what is shaped like a shard holds this rank's rows of the state."""
    dtensors, names = DTensors(model), {master: name for name, master in model.masters().items()}
    shown = dict(state_dict["state"])
    for number, parameter in enumerate(_parameters(optimizer)):
        if parameter in names and number in shown:
            shown[number] = {
                key: dtensors.make(names[parameter], value) if _is_like(value, parameter) else value
                for key, value in shown[number].items()
            }
    return shown


def _is_like(value: Any, parameter: nn.Parameter) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape


def _keep_rows(optimizer: torch.optim.Optimizer) -> None:
    """Leave this rank's rows in place of DTensors, which may have been loaded."""
    for state in optimizer.state.values():
        state.update({key: each.to_local() for key, each in state.items() if isinstance(each, DTensor)})


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]
