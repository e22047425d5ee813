"""What is saved of a sharded model and its optimizer in a folder, and loaded on any number of ranks.

Between passes the model holds DTensors under its own names, and the optimizer's state is made of DTensors too. A
DTensor knows the whole tensor's shape and which rows of it are here: torch.distributed.checkpoint writes and reads them
rank by rank, and on another number of ranks reads other rows.

The folder always holds a complete checkpoint. A new one is written beside it and takes its place at the end, so a save
that is interrupted leaves the old one intact.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from scratch_ddp.common.agreement import raise_everywhere, together

MODEL, OPTIMIZER = "model.", "optimizer."  # what the names of their tensors begin with
OTHERS = "others"  # the name of all that is not a tensor
BEFORE = ".before"  # what the name of the old checkpoint's folder ends with, while it is replaced
Group = dist.ProcessGroup | None


def save(model: nn.Module, folder: str | os.PathLike, optimizer: Optimizer | None, extra: Any, group: Group) -> None:
    """Write the model, the optimizer's state and `extra`. See `FSDP.save`."""
    state = {MODEL + name: value for name, value in model.state_dict().items()}
    groups, problem, names = None, None, {each: name for name, each in model.named_parameters()}
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
    _write(Path(folder), tensors, {"values": values, "groups": groups, "extra": extra}, group)


def load(model: nn.Module, folder: str | os.PathLike, optimizer: Optimizer | None, group: Group) -> Any:
    """Load what `save` has written; return the `extra` of it. See `FSDP.load`."""
    folder = Path(folder)
    before = folder.with_name(folder.name + BEFORE)
    if not folder.exists() and before.exists():  # a save was interrupted while it replaced this one
        folder = before
    raise_everywhere(None if folder.exists() else f"{folder} holds no checkpoint", group, FileNotFoundError)
    with together(group, what=f"{folder} holds no checkpoint, or one that was cut short"):
        metadata = dcp.FileSystemReader(folder).read_metadata()
        if OTHERS not in metadata.state_dict_metadata:
            raise ValueError("it was not written by save()")
        for place in metadata.storage_data.values():
            path, end = folder / place.relative_path, place.offset + place.length
            if (size := path.stat().st_size) < end:
                raise ValueError(f"{path.name} has {size} bytes, {end} were written")
    others = _read(folder, {OTHERS: None}, group)[OTHERS]
    entries = metadata.state_dict_metadata.items()
    saved = {key: entry for key, entry in entries if isinstance(entry, TensorStorageMetadata)}
    state = {MODEL + name: value for name, value in model.state_dict().items()}
    groups, problem = others["groups"], None
    if odd := {key for key in (*saved, *others["values"]) if key.startswith(MODEL)} ^ state.keys():
        problem = f"the checkpoint is of another model: one of them lacks {min(odd).removeprefix(MODEL)!r}"
    elif optimizer is not None and groups is None:
        problem = "the checkpoint was saved without an optimizer"
    elif optimizer is not None:
        names = {each: name for name, each in model.named_parameters()}
        if [each["params"] for each in groups] != [each["params"] for each in _groups(optimizer, names)]:
            problem = "the checkpoint is of another optimizer, with other parameters or other groups"
    raise_everywhere(problem, group)
    if optimizer is not None:
        state |= {key: _room(key, entry, model) for key, entry in saved.items() if key.startswith(OPTIMIZER)}
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    _read(folder, tensors, group)
    state |= others["values"]
    model.load_state_dict({key.removeprefix(MODEL): value for key, value in state.items() if key.startswith(MODEL)})
    if optimizer is not None:
        named: dict[str, dict[str, Any]] = {}
        for key in filter(lambda key: key.startswith(OPTIMIZER), state):
            name, _, entry = key.removeprefix(OPTIMIZER).rpartition(".")
            named.setdefault(name, {})[entry] = state[key]
        optimizer.load_state_dict({"state": named, "param_groups": groups})  # the parameters by their order
    return others["extra"]


def _groups(optimizer: Optimizer, names: dict[nn.Parameter, str]) -> list[dict[str, Any]]:
    """The optimizer's groups, with the parameters' names in place of parameters; None for one that has none."""
    return [{**group, "params": [names.get(each) for each in group["params"]]} for group in optimizer.param_groups]


def _room(key: str, saved: TensorStorageMetadata, model: nn.Module) -> torch.Tensor:
    """A tensor for a part of the optimizer's state: cut as its parameter is if it has that shape, else whole."""
    parameter = model.get_parameter(key.removeprefix(OPTIMIZER).rpartition(".")[0])
    if saved.size == parameter.shape:
        return torch.empty_like(parameter.detach(), dtype=saved.properties.dtype)
    return torch.empty(saved.size, dtype=saved.properties.dtype)


def _write(folder: Path, state: dict[str, Any], others: Any, group: Group) -> None:
    """Write tensors to a folder, and the first rank's `others`: anything that torch.save takes. Every rank calls it.

    A tensor that is not a DTensor is the same on every rank, and one rank writes it. Raises OSError on every rank if
    the folder can't be written; it then still holds what it held before.
    """
    partial, before = (folder.with_name(folder.name + end) for end in (".partial", BEFORE))
    is_first = dist.get_rank(group) == 0
    with together(group, OSError):
        for place in (folder, partial, before) if is_first else ():  # only checkpoints are ever removed
            if place.exists() and not (place.is_dir() and all(_is_ours(each) for each in place.iterdir())):
                raise FileExistsError(f"{place} exists and is not a checkpoint: choose a folder used for nothing else")
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)  # left by an interrupted save
            partial.mkdir(parents=True)
    state = state | ({OTHERS: others} if is_first else {})
    with together(group, OSError, f"{folder} can't be written"):
        planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)  # lists stay whole
        dcp.save(state, checkpoint_id=partial, planner=planner, process_group=group)
    with together(group, OSError):
        if is_first and folder.exists():  # the old one stays beside the new one until that is in place
            shutil.rmtree(before, ignore_errors=True)
            os.rename(folder, before)
        if is_first:
            os.rename(partial, folder)
            shutil.rmtree(before, ignore_errors=True)


def _read(folder: Path, state: dict[str, Any], group: Group) -> dict[str, Any]:
    """Fill `state` and return it; of a DTensor, this rank's rows. Raises ValueError on every rank if it fails."""
    with together(group, what=f"{folder} can't be read; what has been loaded of it is unusable"):
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        dcp.load(state, checkpoint_id=folder, planner=planner, process_group=group)
    return state


def _is_ours(path: Path) -> bool:
    return path.name == ".metadata" or path.suffix in (".distcp", ".tmp")
