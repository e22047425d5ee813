"""A sharded optimizer's state: which of it a rank takes, and each rank's share in a folder.

Parameters have their numbers in the plain optimizer's state dict. So any number of ranks can load what any other number
has saved, and a plain optimizer can load the whole state.
"""

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from scratch_ddp.common import checkpoint

GROUPS = "param_groups"


def share_of(
    state_dict: Mapping[str, Any], needed: Mapping[int, torch.Tensor], present: Container[int]
) -> dict[str, Any]:
    """Return a state dict with the state of the `needed` parameters (by number) only.

    `present`: those that have state here. Raises ValueError if it is another model's, or lacks what this rank needs.
    """
    names = [name for group in state_dict[GROUPS] for name in group["params"]]  # from torch's functions, else numbers
    share, state = state_dict.get("share", range(len(names))), {}
    for number, name in enumerate(names):
        if number not in needed:
            continue
        if number not in share or isinstance(name, str) and number in present and name not in state_dict["state"]:
            raise ValueError(
                f"the state of parameter {name!r} is missing, which this rank owns; get_state_dict() of a sharded "
                "optimizer returns a rank's own share, also with full_state_dict=True: save it with dcp.save() or "
                "save() on every rank, or take the whole state from gather_full_state_dict()"
            )
        if name in state_dict["state"]:
            state[name] = state_dict["state"][name]
            for key, value in state[name].items():  # of the parameter's shape, or one number for several elements
                _check_shape(f"{key!r} of parameter {name!r}", torch.as_tensor(value), needed[number].shape)
    return {"state": state, GROUPS: state_dict[GROUPS]}


def _check_shape(name: str, value: torch.Tensor, shape: torch.Size) -> None:
    try:
        torch.broadcast_to(value, shape)
    except RuntimeError:
        shapes = f"shape {tuple(value.shape)}, the parameter has {tuple(shape)}"
        raise ValueError(f"{name} was saved with {shapes}: it is another model's") from None


def save(folder: str | Path, share: Mapping[str, Any], group: dist.ProcessGroup | None) -> None:
    """Write a rank's share, as in `ShardedOptimizer.state_dict()`; tensors are called state.3.exp_avg."""
    state = {f"state.{i}.{key}": value for i, entry in share["state"].items() for key, value in entry.items()}
    checkpoint.write(folder, state, {GROUPS: share[GROUPS]}, group)


def load(folder: str | Path, numbers: Container[int], group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Read groups, and the state of the parameters with these numbers, whoever saved it. Every rank calls it."""
    place, metadata = checkpoint.read_metadata(folder, group)
    others = checkpoint.read_others(place, group)
    if GROUPS not in others:
        raise ValueError(f"{folder} holds a checkpoint, but no state of a sharded optimizer")
    rooms: dict[str, torch.Tensor | None] = {}
    for name, saved in metadata.state_dict_metadata.items():
        if name.startswith("state.") and int(name.split(".")[1]) in numbers:
            is_tensor = isinstance(saved, TensorStorageMetadata)
            rooms[name] = torch.empty(saved.size, dtype=saved.properties.dtype) if is_tensor else None
    checkpoint.read(place, rooms, group)
    state: dict[int, dict[str, Any]] = {}
    for name, value in rooms.items():
        _, number, key = name.split(".", 2)
        state.setdefault(int(number), {})[key] = value
    return {"state": state, GROUPS: others[GROUPS]}
