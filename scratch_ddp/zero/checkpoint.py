"""Saving and loading a sharded optimizer's state: whole on one rank, or each rank's share in a folder.

Parameters have their numbers in the plain optimizer's state dict. So any number of ranks can load what any other number
has saved, and a plain optimizer can load the whole state.
"""

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from scratch_ddp.common import checkpoint

State = dict[int, dict[str, Any]]  # by the parameter's number: as in state_dict()["state"]
PREFIX = "state."  # of the tensors' names in a folder: state.3.exp_avg
GROUPS = "param_groups"


def gather_state(mine: State, owners: Sequence[int], to: int, group: dist.ProcessGroup | None) -> State:
    """Return, on rank `to` of the group, the state of all ranks in main memory; on the others only their own.

    `owners`: the rank of each parameter's owner, by its number. One parameter's state is sent at a time, so `to` needs
    memory for the whole state, and the others for no more than they have.
    """
    me, whole = dist.get_rank(group), {}
    for number, owner in enumerate(owners):
        entry = {key: value.cpu() if torch.is_tensor(value) else value for key, value in mine.get(number, {}).items()}
        box = [entry]
        if me == owner != to:
            dist.send_object_list(box, group=group, group_dst=to)
        elif me == to != owner:
            dist.recv_object_list(box, group=group, group_src=owner)
        if box[0]:
            whole[number] = box[0]
    return whole


def share_of(
    state_dict: Mapping[str, Any], needed: Mapping[int, torch.Tensor], present: Container[int]
) -> dict[str, Any]:
    """Return a state dict with the state of the `needed` parameters (by number) only.

    `present`: those that have state here. Raises ValueError if it is another model's, or lacks what this rank needs.
    """
    names = [name for group in state_dict[GROUPS] for name in group["params"]]  # from torch's functions, else numbers
    share = state_dict.get("share", range(len(names)))
    state = {}
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
            _check_shapes(f"parameter {name!r}", state[name], needed[number].shape)
    return {"state": state, GROUPS: state_dict[GROUPS]}


def _check_shapes(name: str, entry: Mapping[str, Any], shape: torch.Size) -> None:
    """State has its parameter's shape, or a smaller one where one number serves several elements."""
    for key, value in entry.items():
        try:
            torch.broadcast_to(value, shape) if torch.is_tensor(value) else None
        except RuntimeError:
            shapes = f"shape {tuple(value.shape)}, the parameter has {tuple(shape)}"
            raise ValueError(f"{key!r} of {name} was saved with {shapes}: it is another model's") from None


def load(folder: str | Path, numbers: Container[int], group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Read groups, and the state of the parameters with these numbers, whoever saved it. Every rank calls it."""
    place, metadata = checkpoint.read_metadata(folder, group)
    others = checkpoint.read_others(place, metadata, group)
    if GROUPS not in others:
        raise ValueError(f"{folder} holds a checkpoint, but no state of a sharded optimizer")
    rooms: dict[str, torch.Tensor | None] = {}
    for name, saved in metadata.state_dict_metadata.items():
        kind, number, _ = [*name.split(".", 2), "", ""][:3]
        if kind == "state" and int(number) in numbers:
            is_tensor = isinstance(saved, TensorStorageMetadata)
            rooms[name] = torch.empty(saved.size, dtype=saved.properties.dtype) if is_tensor else None
    checkpoint.read(place, rooms, group)
    state: State = {}
    for name, value in rooms.items():
        _, number, key = name.split(".", 2)
        state.setdefault(int(number), {})[key] = value
    return {"state": state, GROUPS: others[GROUPS]}
