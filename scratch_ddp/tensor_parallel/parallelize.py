"""`parallelize`: change the layers of a model in place, as a plan says."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.common.agreement import together
from scratch_ddp.common.replicas import broadcast_from_first, describe, named_tensors
from scratch_ddp.common.wrapper import Group, process_group
from scratch_ddp.tensor_parallel.sliced import keep_parameters

Install = Callable[[], object]
Change = nn.Module | Install
Entry = Callable[[nn.Module, dist.ProcessGroup | None], Change]
Model = TypeVar("Model", bound=nn.Module)


def parallelize(model: Model, plan: Mapping[str, Entry], group: Group = None) -> Model:
    """Change a model in place so that each rank of `group` holds slices of it; return the model.

    `plan`: what becomes of the modules whose names end in each of its keys ("q_proj", "layers.0"); "" is the model
    itself. An entry is called with a module and the group. It returns the layer that takes the module's place, such as
    ColumnParallelLinear, or a function that changes the module, which is called once all entries have agreed.
    Parameters keep their names and become slices themselves: tied ones stay tied, and an optimizer that has them but
    no state yet goes on with them. Every rank holds the whole model before; the first rank's values win.
    Outside of the slices ranks compute the same, so they need the same inputs there, and for dropout the same seed.
    Raises ValueError on every rank, and changes nothing, if an entry matches nothing or can't be followed on some
    rank, or if the ranks' models differ in shape. Costs a small all-reduce and broadcasts of the whole model.
    """
    group = process_group(group)
    with together(group, complaint="the ranks slice different models; do the same everywhere") as lines:
        lines += describe(model)
        if any(isinstance(each, nn.Dropout) and each.p for each in model.modules()):  # on what is whole, the same
            lines.append(f"dropout, with the seed {torch.initial_seed()}")
        changes = _prepare(model, plan, group)
    broadcast_from_first((each for _, each in named_tensors(model)), group)
    for name, change in changes.items():
        if isinstance(change, nn.Module):
            plain = model.get_submodule(name)
            model.set_submodule(name, change)
            keep_parameters(plain, change)
    for change in dict.fromkeys(changes.values()):
        if not isinstance(change, nn.Module):
            change()
    return model


def _prepare(model: nn.Module, plan: Mapping[str, Entry], group: dist.ProcessGroup | None) -> dict[str, Change]:
    """Return what each named module is to become. Changes nothing."""
    names = dict(model.named_modules(remove_duplicate=False))
    places = {ending: [name for name in names if f".{name}".endswith(f".{ending}")] for ending in plan}
    for ending in (each for each, found in places.items() if not found):
        similar = get_close_matches(ending.rpartition(".")[2], {name.rpartition(".")[2] for name in names}, n=1)
        hint = f"; is {similar[0]} meant?" if similar else ""
        raise ValueError(f"the plan's {ending!r} matches no module{hint}")
    changes: dict[str, Change] = {}
    follow = cache(lambda entry, module: entry(module, group))  # once for a module that has several names
    for ending, name in ((ending, name) for ending, found in places.items() for name in found):
        if name in changes:
            raise ValueError(f"two entries of the plan match {name!r}")
        try:
            changes[name] = follow(plan[ending], names[name])
        except ValueError as error:
            raise ValueError(f"{name or 'the model'}: {error}") from None
    replaced = {name for name, change in changes.items() if isinstance(change, nn.Module)}
    for path, change in changes.items():
        if hasattr(change, "leave_whole"):
            named, start = dict(names[path].named_parameters()), f"{path}." if path else ""
            whole = [name for name in named if f"{start}{name}".rpartition(".")[0] not in replaced]
            change.leave_whole(path, {name: named[name] for name in whole})
    cuts: dict[nn.Parameter, dict[str, int | None]] = {}  # of each parameter, by its names
    for name, parameter in model.named_parameters(remove_duplicate=False):
        module, _, own = name.rpartition(".")
        cuts.setdefault(parameter, {})[name] = getattr(changes.get(module), "cuts", {}).get(own)
    for tied in cuts.values():
        if len({*tied.values()}) > 1:
            raise ValueError(f"{' and '.join(tied)} are the same parameter: the plan must slice all of them alike")
    return changes
