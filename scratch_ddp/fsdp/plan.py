"""What is gathered together: a plan of which parameters make up which unit, as the caller asks; then they are cut."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.common.agreement import together
from scratch_ddp.common.replicas import broadcast_from_first, describe
from scratch_ddp.common.tensors import group_alike
from scratch_ddp.fsdp.comm import Ranks
from scratch_ddp.fsdp.unit import ROOT, Place, Unit, hold

Spec = Iterable[nn.Module | type] | None
Init = Callable[[nn.Module], object]
REPLACED = "_replaced_by_shard"  # an attribute of parameters that a model had before, or has in a pass: their names
NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
Places = dict[str, list[Place]]  # by the names of parameters: where they are held
Plan = dict[str, Places]  # by the names of the units' modules, the root first


def agree_on_plan(model: nn.Module, group: dist.ProcessGroup | None, units: Spec, settings: Mapping[str, Any]) -> Plan:
    """Return which parameters are gathered together. `settings`: other arguments of `FSDP`, by name. Changes nothing.

    A parameter that only one unit holds belongs to that unit. One that no unit holds, or that is tied between units,
    belongs to the root, which is gathered in the forward pass and freed at the end of backward.
    Raises ValueError on every rank if one rank's model can't be wrapped as asked, or if the ranks differ.
    """
    with together(group, complaint="the ranks wrap different models; do the same everywhere") as lines:
        _check_wrappable(model)
        chosen = set(_blocks(model) if units is None else _named_in(units, model))
        names = {module: name for name, module in model.named_modules() if module is model or module in chosen}
        used: dict[nn.Parameter, dict[str, list[Place]]] = {}
        _find_places(model, ROOT, names, used)
        plan: Plan = {name: {} for name in names.values()}
        for name, parameter in model.named_parameters():  # tied parameters once
            unit, *others = used[parameter]
            plan[ROOT if others else unit][name] = [place for places in used[parameter].values() for place in places]
        lines += [*describe(model), ", ".join(f"{name} {value}" for name, value in settings.items())]
        for name, places in plan.items():
            what = f"unit {name!r}" if name else "the root"
            lines.append(f"{what} with {', '.join(places) or 'no parameters'}")
    return plan


def _find_places(
    module: nn.Module, unit: str, units: Mapping[nn.Module, str], used: dict[nn.Parameter, dict[str, list[Place]]]
) -> None:
    """Note where each parameter is held, and in which units, also through modules that units share."""
    if unit != ROOT and units.get(module, unit) != unit:
        raise ValueError(f"units overlap: {units[module]!r} lies in {unit!r}; keep one of them")
    unit = units.get(module, unit)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            used.setdefault(parameter, {}).setdefault(unit, []).append((module, name))
    for child in module.children():
        _find_places(child, unit, units, used)


def _check_wrappable(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "sliced_over"):
            raise ValueError(
                f"{name!r} is a slice of a tensor-parallel layer: the norm of the gradients and the checkpoints would "
                "be those of this rank's slices alone. Replicate it instead, BucketedDDP(model, group=mesh['dp'])"
            )
        if type(parameter.data) is not torch.Tensor:
            kind = type(parameter.data).__name__
            raise ValueError(f"{name!r} is a {kind}, and only plain tensors can be sharded: a part is wrapped already?")
        if getattr(parameter, "_post_accumulate_grad_hooks", None) or parameter._backward_hooks:
            raise ValueError(
                f"{name!r} has hooks, of another wrapper perhaps: remove them first, as remove_hooks() does"
            )


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The elements of the outermost lists of modules; without such lists the model's own children."""
    if not isinstance(model, nn.MultiheadAttention):  # which reads its child's weight itself
        found = [*_elements(model)] or model.children()
        yield from (each for each in found if not isinstance(each, NEVER_CALLED))


def _elements(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and not isinstance(child, NEVER_CALLED):
            yield child
        else:
            yield from _elements(child)


def _named_in(units: Iterable[nn.Module | type], model: nn.Module) -> Iterator[nn.Module]:
    """The modules that are meant by `units`."""
    for entry in units:
        kind = entry if isinstance(entry, type) else ()
        found = [module for module in model.modules() if module is entry or isinstance(module, kind)]
        if not found:
            what = kind or type(entry)
            raise ValueError(f"units: {what.__name__} is no module of the model, nor the type of one")
        yield from found


def make_units(
    model: nn.Module,
    plan: Plan,
    ranks: Ranks,
    compute_dtype: torch.dtype | None,
    init: Init | None,
    device: torch.device,
) -> list[Unit]:
    """Leave each rank its rows of the first rank's values, one unit after the other. The root's come first in the list.

    What is on the meta device is put on `device`, and `init` gives it values, module by module: `reset_parameters()` by
    default. Raises on every rank what `init` raises, and ValueError if it leaves values unset. One broadcast per unit.
    """
    units: list[Unit] = []
    for name in reversed(plan):  # the root last
        unset = [each for each in model.get_submodule(name).modules() if any(tensor.is_meta for tensor in _own(each))]
        _allocate(unset, [*plan[name].values(), *plan[ROOT].values()], device)  # they may hold some of the root's
        for module in unset:
            with torch.no_grad():
                init(module) if init else module.reset_parameters()
            if any(each.is_floating_point() and each.isnan().any() for each in _own(module)):
                kind = type(module).__name__
                raise ValueError(f"init of a {kind} left some of its parameters or buffers without values, or NaN")
        units = [*_cut(name, plan[name], ranks, compute_dtype), *units]
    broadcast_from_first(model.buffers(), ranks.everyone)
    return units


def _cut(name: str, places: Places, ranks: Ranks, compute_dtype: torch.dtype | None) -> Iterator[Unit]:
    """Cut the parameters of one module: a unit for each dtype, those that are trained apart from frozen ones."""
    names = {module._parameters[own]: each for each, [(module, own), *_] in places.items()}
    for wanted in (True, False):
        for alike in group_alike(parameter for parameter in names if parameter.requires_grad is wanted):
            unit = Unit(name, {names[each]: each for each in alike}, places, ranks, compute_dtype)
            for before, each in zip(alike, unit.pieces, strict=True):
                for stale in (before, each.whole):
                    setattr(stale, REPLACED, each.name)
            yield unit


def _allocate(modules: list[nn.Module], places: list[list[Place]], device: torch.device) -> None:
    """Put what is on the meta device on `device`, full of NaN: so it is seen what `init` leaves out."""

    def room(tensor: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor
        return made.fill_(float("nan")) if tensor.is_meta and tensor.is_floating_point() else made

    for module in modules:
        module._apply(room, recurse=False)
    for each in places if modules else ():  # what was tied is tied again
        made = [module._parameters[name] for module, name in each if not module._parameters[name].is_meta]
        if made:
            hold(each, made[0])


def _own(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]
