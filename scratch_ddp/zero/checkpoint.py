"""Saving and loading a sharded optimizer's state: whole on one rank, or each rank's share in a folder.

Parameters have their numbers in the plain optimizer's state dict. So any number of ranks can load what any other number
has saved, and a plain optimizer can load the whole state.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from scratch_ddp.common import checkpoint
from scratch_ddp.common.agreement import message_device

State = dict[int, dict[str, Any]]  # by the parameter's number: as in state_dict()["state"]
PREFIX = "state."  # of the tensors' names in a folder: state.3.exp_avg
GROUPS = "param_groups"


@dataclass
class _SentNext:
    """Stands for a tensor that is sent in a message of its own."""

    shape: torch.Size
    dtype: torch.dtype


def gather_state(mine: State, to: int, group: dist.ProcessGroup | None) -> State:
    """Return, on rank `to` of the group, the state of all ranks in main memory; an empty one elsewhere.

    Costs one gather of a description, then one message for each tensor that `to` does not own. One tensor is sent at a
    time, so `to` needs memory for the whole state, and the others for no more than they have.
    """
    me, device = dist.get_rank(group), message_device(group)
    described = {
        number: {
            key: _SentNext(value.shape, value.dtype) if _is_sent_alone(value) else value for key, value in entry.items()
        }
        for number, entry in mine.items()
    }
    everyones: list = [None] * dist.get_world_size(group)
    dist.gather_object(described, everyones if me == to else None, group=group, group_dst=to)
    if me != to:
        for value in (value for entry in mine.values() for value in entry.values() if _is_sent_alone(value)):
            dist.send(value.to(device).contiguous(), group=group, group_dst=to)
        return {}
    whole: State = {number: {key: _to_cpu(value) for key, value in entry.items()} for number, entry in mine.items()}
    for source, described in enumerate(everyones):
        if source != me:
            for number, entry in described.items():
                whole[number] = {key: _receive(value, source, device, group) for key, value in entry.items()}
    return dict(sorted(whole.items()))


def _is_sent_alone(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.layout == torch.strided


def _receive(value: Any, source: int, device: torch.device, group: dist.ProcessGroup | None) -> Any:
    if not isinstance(value, _SentNext):
        return _to_cpu(value)
    tensor = torch.empty(value.shape, dtype=value.dtype, device=device)
    dist.recv(tensor, group=group, group_src=source)
    return tensor.cpu()


def _to_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def state_by_number(
    state_dict: Mapping[str, Any],
    groups: list[dict[str, Any]],
    needed: Mapping[int, torch.Tensor],
    present: Container[int],
) -> State:
    """Return the state in a state dict, by number also where it has names, if it is of an optimizer with these groups.

    `needed`: the parameters whose state is to be loaded, by number. `present`: those that have state here. Raises
    ValueError if it is another optimizer's, or lacks the state that this rank needs.
    """
    if not (isinstance(state_dict, Mapping) and {"state", "param_groups"} <= state_dict.keys()):
        raise ValueError("this is no optimizer's state dict: it has no 'state' and 'param_groups'")
    saved = [len(group["params"]) for group in state_dict["param_groups"]]
    here = [len(group["params"]) for group in groups]
    if saved != here:
        raise ValueError(f"the state was saved for groups of {saved} parameters, this optimizer has groups of {here}")
    for old, new in zip(state_dict["param_groups"], groups, strict=True):
        pairs = zip(old.get("param_names", ()), new.get("param_names", ()), strict=False)
        if wrong := next((pair for pair in pairs if pair[0] != pair[1]), None):
            raise ValueError(f"the state was saved for {wrong[0]!r}, where this optimizer has {wrong[1]!r}")
    if "share" in state_dict and (missing := sorted(needed.keys() - set(state_dict["share"]["parameters"]))):
        raise ValueError(
            f"this is a share of rank {state_dict['share']['rank']}, which lacks the state of parameters {missing}: "
            "load the whole state (gather_full_state_dict), or a folder that save() has written"
        )
    names = [name for group in state_dict["param_groups"] for name in group["params"]]
    state = {number: state_dict["state"][name] for number, name in enumerate(names) if name in state_dict["state"]}
    if any(isinstance(name, str) for name in names):
        lacking = next((names[number] for number in needed if number in present and number not in state), None)
        if lacking is not None:
            raise ValueError(
                f"the state of {lacking!r} is missing, which this rank owns; get_state_dict() of a sharded optimizer "
                "returns a rank's own share, also with full_state_dict=True: save it with dcp.save() on every rank, or "
                "take the whole state from gather_full_state_dict()"
            )
    for number, parameter in needed.items():
        for key, value in state.get(number, {}).items():
            if isinstance(value, torch.Tensor) and not _fits(value.shape, parameter.shape):
                shapes = f"shape {tuple(value.shape)}, the parameter {tuple(parameter.shape)}"
                raise ValueError(f"{key!r} of parameter {number} was saved with {shapes}: it is another model's")
    return state


def _fits(state: torch.Size, parameter: torch.Size) -> bool:
    """State has its parameter's shape, or a smaller one where one number serves several elements."""
    try:
        return torch.broadcast_shapes(state, parameter) == parameter
    except RuntimeError:
        return False


def save(state_dict: dict[str, Any], folder: str | Path, group: dist.ProcessGroup | None) -> None:
    """Write every rank's share of the state to the folder. Every rank calls it."""
    entries = ((number, key, value) for number, entry in state_dict["state"].items() for key, value in entry.items())
    tensors = {f"{PREFIX}{number}.{key}": value for number, key, value in entries}
    checkpoint.write(folder, tensors, {GROUPS: state_dict[GROUPS]}, group)


def load(folder: str | Path, numbers: Container[int], group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Read groups, and the state of the parameters with these numbers, whoever saved it. Every rank calls it."""
    place, metadata = checkpoint.read_metadata(folder, group)
    room: dict[str, Any] = {}
    for name, saved in metadata.state_dict_metadata.items():
        if name.startswith(PREFIX) and int(name.split(".")[1]) in numbers:
            is_tensor = isinstance(saved, TensorStorageMetadata)
            room[name] = torch.empty(saved.size, dtype=saved.properties.dtype) if is_tensor else None
    others = checkpoint.read_others(place, metadata, group)
    if GROUPS not in others:
        raise ValueError(f"{folder} holds a checkpoint, but no state of a sharded optimizer")
    checkpoint.read(place, room, group)
    state: State = {}
    for name, value in room.items():
        _, number, key = name.split(".", 2)
        state.setdefault(int(number), {})[key] = value
    return {"state": state, GROUPS: others[GROUPS]}
