"""State dicts of the whole model, on the first rank."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.common.accounting import set_up
from scratch_ddp.common.agreement import raise_everywhere
from scratch_ddp.common.replicas import broadcast_from_first
from scratch_ddp.fsdp.full import gather_rows_of, spread_rows_of
from scratch_ddp.fsdp.parts import Parts

State = dict[str, torch.Tensor]
Fact = tuple[torch.Size, torch.dtype]


def entries(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers under the names of `model.state_dict()`, in its order, tied ones each time."""
    for path, module in model.named_modules(remove_duplicate=False):
        persistent = module._buffers.keys() - module._non_persistent_buffers_set
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and (name in module._parameters or name in persistent):
                yield f"{path}.{name}".lstrip("."), tensor


def whole_state(model: nn.Module, parts: Parts, group: dist.ProcessGroup | None) -> State:
    """Return, on the first rank, the state dict of the whole model in main memory; an empty one elsewhere.

    One all-gather a unit, and no more than a unit in memory on the other ranks.
    """
    first = dist.get_rank(group) == 0
    whole = {name: master.detach().cpu().clone() for name, master in parts.replicated.masters.items()}
    for shards in parts.shards:
        gathered = gather_rows_of(shards, shards.shards, keep=first)
        whole |= {name: tensor.cpu() for name, tensor in gathered.items()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    if not first:
        return {}
    return {key: whole[names[each]] if each in names else each.detach().cpu().clone() for key, each in entries(model)}


def load_whole_state(model: nn.Module, parts: Parts, state: Any, group: dist.ProcessGroup | None) -> None:
    """Give every rank its rows of the first rank's `state`, a state dict of the whole model or the path of one.

    Raises ValueError on every rank if it can't be read or is not this model's. One broadcast a unit.
    """
    problem, first = None, dist.get_rank(group) == 0
    if first:
        state, problem = _read(state)
        if problem is None:
            there = {key: (tensor.shape, tensor.dtype) for key, tensor in state.items()}
            problem = why_not_this_models(there, facts(model, parts))
    raise_everywhere(problem, group)
    with set_up():
        for shards in parts.shards:
            spread_rows_of(shards, state if first else None)
        if first:
            for name, master in parts.replicated.masters.items():
                master.data.copy_(state[name])
            for key, tensor in entries(model):
                if not isinstance(tensor, nn.Parameter):
                    tensor.copy_(state[key])
        broadcast_from_first([*parts.replicated.masters.values(), *model.buffers()], group)
    parts.buffers.remember()


def write_whole_state(path: str | os.PathLike, state: State, group: dist.ProcessGroup | None) -> None:
    """Write the first rank's state dict to a file. What was there before is replaced when the new one is complete."""
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


def why_not_this_models(there: Mapping[str, Fact], here: Mapping[str, Fact]) -> str | None:
    """Say how what was saved differs in names, shapes or dtypes from what is here, or return None if it fits."""
    for key, (shape, dtype) in here.items():
        if key not in there:
            return f"the checkpoint is of another model: it lacks {key!r}"
        if tuple(there[key][0]) != tuple(shape):
            shapes = f"{tuple(there[key][0])} there and {tuple(shape)} here"
            return f"the checkpoint is of another model: {key!r} has the shape {shapes}"
        if there[key][1] != dtype:
            return f"the checkpoint is of another dtype: {key!r} is {there[key][1]} there and {dtype} here"
    if unknown := next((key for key in there if key not in here), None):
        return f"the checkpoint is of another model: it has {unknown!r}, which this one lacks"
    return None


def facts(model: nn.Module, parts: Parts) -> dict[str, Fact]:
    """Shapes and dtypes as they are saved: a parameter's own dtype, not the one it is computed in."""
    masters, names = parts.masters(), {parameter: name for name, parameter in model.named_parameters()}
    return {
        key: (each.shape, masters[names[each]].dtype if each in names else each.dtype) for key, each in entries(model)
    }


def _read(state: Any) -> tuple[Any, str | None]:
    """Return a state dict, and what is wrong with it."""
    if isinstance(state, (str, os.PathLike)):
        try:
            state = torch.load(state, map_location="cpu", weights_only=True)
        except Exception as error:  # torch's readers raise many kinds for a file that was cut short
            return (
                None,
                f"{state} can't be read; it is no state dict, or was cut short: {type(error).__name__}: {error}",
            )
    if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        return None, f"the first rank must pass a state dict or the path of one, not {type(state).__name__}"
    return state, None
