"""Checkpoints of a sharded model and its optimizer in a folder, loaded on any number of ranks.

Between passes the model and the optimizer's state are made of DTensors. A DTensor knows the whole tensor's shape and
which rows of it are here: torch.distributed.checkpoint reads and writes them rank by rank.

The folder always holds a complete checkpoint. A new one is written beside it and takes its place at the end, so a save
that is interrupted leaves the old one intact.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from scratch_ddp.common.agreement import raise_everywhere, together

Group = dist.ProcessGroup | None


def save(model: nn.Module, folder: str | os.PathLike, optimizer: Optimizer | None, extra: Any, group: Group) -> None:
    """Write the model, the optimizer's state and `extra`. See `FSDP.save`."""
    folder, is_first = Path(folder), dist.get_rank(group) == 0
    partial = folder.with_name(folder.name + ".partial")
    with together(group, OSError):
        if is_first:
            _prepare(folder, partial)
    planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)  # what is on all ranks, the first one writes
    with together(group, OSError, f"{folder} can't be written"):
        state = _state(model, optimizer) | {"extra": (extra,)}  # torch takes dicts and lists apart, but not a tuple
        dcp.save(state, checkpoint_id=partial, planner=planner, process_group=group)
        if is_first:  # torch returns when all ranks have written
            _put_in_place(partial, folder)


def load(model: nn.Module, folder: str | os.PathLike, optimizer: Optimizer | None, group: Group) -> Any:
    """Load what `save` has written; return the `extra` of it. See `FSDP.load`."""
    folder = Path(folder)
    if not folder.exists() and _before(folder).exists():  # a save was interrupted while it replaced this one
        folder = _before(folder)
    raise_everywhere(None if folder.exists() else f"{folder} holds no checkpoint", group, FileNotFoundError)
    with together(group, what=f"{folder} can't be loaded"):
        state = _state(model, optimizer) | {"extra": ()}
        here = dcp.DefaultSavePlanner()
        here.set_up_planner(state)
        for name in dcp.FileSystemReader(folder).read_metadata().state_dict_metadata.keys() - here.state_dict.keys():
            if optimizer is not None or not name.startswith(("optimizer.", "groups")):
                raise ValueError(f"it is of another model or optimizer: there is no {name!r} here")
    with together(group, what=f"{folder} can't be loaded; what has been loaded of it is unusable"):
        dcp.load(state, checkpoint_id=folder, process_group=group)
        its = {"state": state["optimizer"], "param_groups": state["groups"][0]} if optimizer is not None else {}
        set_state_dict(model, optimizer or (), model_state_dict=state["model"], optim_state_dict=its)
    return state["extra"][0]


def _state(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """What is saved. An optimizer that has no state yet gets one of zeros, unless there are gradients."""
    weights, its = get_state_dict(model, optimizer or ())
    return {"model": weights} | ({"optimizer": its["state"], "groups": (its["param_groups"],)} if its else {})


def _prepare(folder: Path, partial: Path) -> None:
    """Make an empty folder for the new checkpoint. Only checkpoints are ever removed."""
    for place in (folder, partial, _before(folder)):
        files = [each.name for each in place.iterdir()] if place.exists() else []
        if not all(name.endswith((".metadata", ".distcp", ".tmp")) for name in files):
            raise FileExistsError(f"{place} exists and is not a checkpoint: choose a folder used for nothing else")
    shutil.rmtree(partial, ignore_errors=True)  # left by an interrupted save
    partial.mkdir(parents=True)


def _put_in_place(partial: Path, folder: Path) -> None:
    """Replace the old checkpoint by the new one. In between, the old one still exists beside it."""
    before = _before(folder)
    if folder.exists():
        shutil.rmtree(before, ignore_errors=True)
        os.rename(folder, before)
    os.rename(partial, folder)
    shutil.rmtree(before, ignore_errors=True)


def _before(folder: Path) -> Path:
    return folder.with_name(folder.name + ".before")
