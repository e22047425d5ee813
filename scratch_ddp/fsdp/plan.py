"""From a plain model to units: which parameters are gathered together, as the caller asks for it; then they are cut."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from scratch_ddp.common.agreement import check_everywhere, gather_rows, raise_everywhere
from scratch_ddp.common.replicas import broadcast_from_first, describe, model_problem, named_tensors
from scratch_ddp.common.tensors import group_alike
from scratch_ddp.common.wrapper import sync_problem
from scratch_ddp.fsdp.comm import Ranks
from scratch_ddp.fsdp.unit import ROOT, Place, Unit

Spec = Iterable[nn.Module | type | str] | None
Init = Callable[[nn.Module], object]
REPLACED = "_replaced_by_shard"  # an attribute of parameters that a model had before it was wrapped: their names
NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass
class Plan:
    """The units' modules by name, the root first; the names of each unit's parameters; where each parameter is held."""

    modules: dict[str, nn.Module]
    parameters: dict[str, list[str]]
    places: dict[str, list[Place]]


def agree_on_plan(model: nn.Module, group: dist.ProcessGroup | None, units: Spec, settings: Mapping[str, Any]) -> Plan:
    """Check the arguments of `FSDP`, `settings` being some of them by name; return the plan. Changes nothing.

    Raises ValueError on every rank if one rank's model can't be wrapped as asked, or if the ranks differ.
    """
    problem = model_problem(model, group, with_values=False) or _problem_with_settings(**settings)
    plan, lines = None, []
    try:
        plan = problem or make_plan(model, units)
    except (TypeError, ValueError) as error:
        problem = str(error)
    if problem is None:
        each = {f"unit {name!r}" if name else "the root": own for name, own in plan.parameters.items()}
        lines = [*describe(model), *(f"{unit} with {', '.join(own) or 'no parameters'}" for unit, own in each.items())]
        lines.append(", ".join(f"{name} {value}" for name, value in settings.items()))
    check_everywhere(problem, lines, "the ranks wrap different models; do the same everywhere", group)
    return plan


def _problem_with_settings(compute_dtype: Any, prefetch: Any, sync: Any, **_: Any) -> str | None:
    if compute_dtype is not None and not (isinstance(compute_dtype, torch.dtype) and compute_dtype.is_floating_point):
        return f"compute_dtype must be a floating-point dtype or None, not {compute_dtype!r}"
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        return f"prefetch must be a number of units, 0 or more, not {prefetch!r}"
    return sync_problem(sync)


def make_plan(model: nn.Module, units: Spec = None) -> Plan:
    """Return which parameters are gathered together. Raises ValueError or TypeError where it can't be done as asked.

    A parameter that only one unit holds belongs to that unit. One that no unit holds, or that is tied between units,
    belongs to the root, which is gathered in the forward pass and freed at the end of backward.
    """
    _check_wrappable(model)
    modules = {ROOT: model} | _find_units(model, units)
    used: dict[nn.Parameter, dict[str, list[Place]]] = {}
    _find_places(model, ROOT, {module: name for name, module in modules.items()}, used)
    plan = Plan(modules, {name: [] for name in modules}, {})
    for name, parameter in model.named_parameters():  # tied parameters once
        unit, *others = used[parameter]
        plan.parameters[ROOT if others else unit].append(name)
        plan.places[name] = [place for places in used[parameter].values() for place in places]
    return plan


def _find_places(
    module: nn.Module, unit: str, units: Mapping[nn.Module, str], used: dict[nn.Parameter, dict[str, list[Place]]]
) -> None:
    """Note where each parameter is held, and in which units, also through modules that units share."""
    unit = units.get(module, unit)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            used.setdefault(parameter, {}).setdefault(unit, []).append((module, name))
    for child in module.children():
        _find_places(child, unit, units, used)


def _check_wrappable(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(f"{name!r} is sharded already: the model, or a part of it, is wrapped in FSDP")
        if type(parameter.data) is not torch.Tensor:
            raise ValueError(f"{name!r} is a {type(parameter.data).__name__}; only plain tensors can be sharded")
        if getattr(parameter, "_post_accumulate_grad_hooks", None) or parameter._backward_hooks:
            raise ValueError(
                f"{name!r} has hooks, of another wrapper perhaps: remove them first, as remove_hooks() does"
            )
    for name, module in model.named_modules():
        if getattr(module, "cuts", None):
            raise ValueError(
                f"{name!r} holds slices of a tensor-parallel layer: the norm of their gradients and their checkpoints "
                "would be those of this rank's slices alone. Replicate it instead, BucketedDDP(model, group=mesh['dp'])"
            )


def _find_units(model: nn.Module, units: Spec) -> dict[str, nn.Module]:
    """Return the units by name, in the model's order, without those that have no parameters."""
    names = {module: name for name, module in model.named_modules()}
    chosen = list(dict.fromkeys(_blocks(model)) if units is None else _named_in(units, names))
    if units is not None and not chosen:
        raise ValueError(
            "units is empty: name the parts of the model to be gathered one at a time, its blocks for example; [model] "
            "gathers the whole model at once, which saves no memory while it computes"
        )
    _check_apart([names[module] for module in chosen])
    for module in chosen:
        if isinstance(module, NEVER_CALLED):
            raise ValueError(
                f"unit {names[module]!r} is a {type(module).__name__}, which is never called: pass what it holds"
            )
    wanted = {module for module in chosen if module is not model and any(True for _ in module.parameters())}
    return {name: module for module, name in names.items() if module in wanted}


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The elements of the outermost lists of modules; without such lists the model's own children."""
    if isinstance(model, nn.MultiheadAttention):
        return []  # it reads its child's weight itself
    return [each for each in [*_elements(model)] or model.children() if not isinstance(each, NEVER_CALLED)]


def _elements(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        yield from module.children()
    else:
        for child in module.children():
            yield from _elements(child)


def _named_in(units: Spec, names: Mapping[nn.Module, str]) -> Iterator[nn.Module]:
    """The modules that are meant by `units`."""
    if isinstance(units, (str, type)) or not isinstance(units, Iterable):
        raise TypeError(f"units must be a list of modules, names or module types, not {units!r}")
    for entry in units:
        if isinstance(entry, type):
            found = [module for module in names if isinstance(module, entry)]
        else:
            found = [module for module, name in names.items() if module is entry or name == entry]
        if not found:
            what = type(entry).__name__ if isinstance(entry, nn.Module) else repr(entry)
            raise ValueError(f"units: {what} is no module of the model, nor the name or the type of one")
        yield from found


def _check_apart(names: list[str]) -> None:
    for one, other in itertools.combinations(names, 2):
        outer, inner = sorted((one, other), key=len)
        if inner == outer or outer == ROOT or inner.startswith(outer + "."):
            raise ValueError(
                f"units overlap: {inner!r} is, or lies in, {outer or 'the whole model'!r}; keep one of them"
            )


def make_units(
    plan: Plan, ranks: Ranks, compute_dtype: torch.dtype | None, init: Init | None, device: torch.device
) -> list[Unit]:
    """Leave each rank its rows of the first rank's values, one unit after the other. The root's come first in the list.

    What is on the meta device is put on `device`; where the first rank has no values, `init` gives them, module by
    module, `reset_parameters()` by default. One broadcast per unit. Raises ValueError on every rank if a module can't
    be initialised or leaves values unset.
    """
    model, units, problem = plan.modules[ROOT], [], None
    unset = torch.tensor([any(tensor.is_meta for _, tensor in named_tensors(model))])
    unset_at_first = bool(gather_rows(unset, ranks.everyone)[0])
    made: dict[torch.Tensor, torch.Tensor] = {}
    for name in reversed(plan.modules):  # the root last: it has what several modules share
        holders = dict.fromkeys(module for each in plan.parameters[name] for module, _ in plan.places[each])
        holders |= dict.fromkeys(model.modules() if name == ROOT else ())  # others may have buffers
        for module in holders:
            problem = _materialise(module, made, (init or _reset) if unset_at_first else None, device) or problem
        units = [*_units_of(name, plan, ranks, compute_dtype), *units]
        made = {
            before: after for before, after in made.items() if not hasattr(after, REPLACED)
        }  # or it stays in memory
    raise_everywhere(problem, ranks.everyone)
    broadcast_from_first(model.buffers(), ranks.everyone)
    return units


def _units_of(name: str, plan: Plan, ranks: Ranks, compute_dtype: torch.dtype | None) -> Iterator[Unit]:
    """Cut the parameters of one module: a unit for each dtype, those that are trained apart from frozen ones."""
    places = {each: plan.places[each] for each in plan.parameters[name]}
    names = {module._parameters[attribute]: each for each, [(module, attribute), *_] in places.items()}
    for wanted in (True, False):
        for alike in group_alike(parameter for parameter in names if parameter.requires_grad is wanted):
            named = {names[parameter]: parameter for parameter in alike}
            unit = Unit(name, named, [places[each] for each in named], ranks, compute_dtype)
            unit.set_rows({each: parameter.data for each, parameter in named.items()})
            for each, parameter in named.items():
                setattr(parameter, REPLACED, each)
            yield unit


def _materialise(
    module: nn.Module, made: dict[torch.Tensor, torch.Tensor], init: Init | None, device: torch.device
) -> str | None:
    """Put what the module has on the meta device on `device`, and initialise it; say what went wrong, or return None.

    `made`: what was put there already, by what it replaces, so that what is tied remains tied.
    """
    own = {}
    for kind in (module._parameters, module._buffers):
        for name, tensor in kind.items():
            if tensor is not None and tensor.is_meta:
                if tensor not in made:
                    made[tensor] = torch.empty_like(tensor, device=device, requires_grad=False)
                    if tensor.is_floating_point():
                        made[tensor].fill_(float("nan"))  # to see what init leaves out
                    if kind is module._parameters:
                        made[tensor] = nn.Parameter(made[tensor], tensor.requires_grad)
                kind[name] = own[name] = made[tensor]
    if not own or init is None:
        return None
    try:
        with torch.no_grad():
            init(module)
    except Exception as error:
        return f"init of a {type(module).__name__} failed: {type(error).__name__}: {error}"
    unset = [name for name, tensor in own.items() if tensor.is_floating_point() and tensor.isnan().any()]
    return f"{unset[0]!r} of a {type(module).__name__} got no values, or NaN, from init" if unset else None


def _reset(module: nn.Module) -> None:
    if not hasattr(module, "reset_parameters"):
        raise ValueError(
            "it has no reset_parameters(): pass init, which is called with each module and gives it values"
        )
    module.reset_parameters()
