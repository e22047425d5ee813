"""A sharded optimizer's state: which of it a rank takes.

Parameters have their numbers in the plain optimizer's state dict. So any number of ranks can load what any other number
has saved, and a plain optimizer can load the whole state.
"""

from collections.abc import Container, Mapping
from typing import Any

import torch


def share_of(
    state_dict: Mapping[str, Any], needed: Mapping[int, torch.Tensor], present: Container[int]
) -> dict[str, Any]:
    """Return a state dict with the state of the `needed` parameters (by number) only.

    `present`: those that have state here. Raises ValueError if it is another model's, or lacks what this rank needs.
    """
    groups = state_dict["param_groups"]
    names = [name for group in groups for name in group["params"]]  # from torch's functions, else numbers
    share, state = state_dict.get("share", range(len(names))), {}
    for number, name in enumerate(names):
        if number not in needed:
            continue
        if number not in share or isinstance(name, str) and number in present and name not in state_dict["state"]:
            raise ValueError(
                f"the state of parameter {name!r} is missing, which this rank owns; get_state_dict() of a sharded "
                "optimizer returns a rank's own share, also with full_state_dict=True: save it with dcp.save() on "
                "every rank, or put the shares of all ranks together"
            )
        if name in state_dict["state"]:
            state[name] = state_dict["state"][name]
            for key, value in state[name].items():  # of the parameter's shape, or one number for several elements
                _check_shape(f"{key!r} of parameter {name!r}", torch.as_tensor(value), needed[number].shape)
    return {"state": state, "param_groups": groups}


def _check_shape(name: str, value: torch.Tensor, shape: torch.Size) -> None:
    try:
        torch.broadcast_to(value, shape)
    except RuntimeError:
        shapes = f"shape {tuple(value.shape)}, the parameter has {tuple(shape)}"
        raise ValueError(f"{name} was saved with {shapes}: it is another model's") from None
