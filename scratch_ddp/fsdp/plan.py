"""Which parameter is gathered with which unit: from what the caller asks for, the same on every rank."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.common.agreement import check_same_lines, raise_everywhere
from scratch_ddp.common.replicas import describe, model_problem
from scratch_ddp.common.wrapper import sync_problem
from scratch_ddp.fsdp.freed_parameter import name_of

Spec = Iterable[nn.Module | type | str] | None
ROOT = ""  # the name of the whole model, as in named_modules()


@dataclass
class Plan:
    """The units' modules by name, the root first; the names of each unit's parameters, and of those not sharded."""

    modules: dict[str, nn.Module]
    parameters: dict[str, list[str]]
    replicated: list[str]

    def lines(self) -> list[str]:
        """What has to be the same on every rank."""
        units = {f"unit {name!r}" if name else "the root": own for name, own in self.parameters.items()}
        lines = [f"{unit} with {', '.join(own) or 'no parameters'}" for unit, own in units.items()]
        return [*lines, f"replicated: {', '.join(self.replicated) or 'nothing'}"]


def agree_on_plan(
    model: nn.Module, group: dist.ProcessGroup | None, units: Spec, replicated: Spec, settings: Mapping[str, Any]
) -> Plan:
    """Check the arguments of `FSDP`, `settings` being some of them by name; return the plan. Changes nothing.

    Raises ValueError on every rank if one rank's model can't be wrapped as asked, or if the ranks differ.
    """
    problem = model_problem(model, group, with_values=False) or _problem_with_settings(**settings)
    plan = None
    try:
        plan = problem or make_plan(model, units, replicated)
    except (TypeError, ValueError) as error:
        problem = str(error)
    raise_everywhere(problem, group)
    lines = [*describe(model), *plan.lines(), ", ".join(f"{name} {value}" for name, value in settings.items())]
    check_same_lines(lines, "the ranks wrap different models; do the same everywhere", group)
    return plan


def _problem_with_settings(compute_dtype: Any, prefetch: Any, sync: Any, **_: Any) -> str | None:
    if compute_dtype is not None and not (isinstance(compute_dtype, torch.dtype) and compute_dtype.is_floating_point):
        return f"compute_dtype must be a floating-point dtype or None, not {compute_dtype!r}"
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        return f"prefetch must be a number of units, 0 or more, not {prefetch!r}"
    return sync_problem(sync)


def make_plan(model: nn.Module, units: Spec = None, replicated: Spec = ()) -> Plan:
    """Return which parameters are gathered together. Raises ValueError or TypeError where it can't be done as asked.

    A parameter that only one unit holds belongs to that unit. One that no unit holds, or that is tied between units,
    belongs to the root, which is gathered in the forward pass and freed at the end of backward.
    """
    _check_wrappable(model)
    modules = {ROOT: model} | _find_units(model, units)
    apart = set(map(id, _find_replicated(model, replicated)))
    holders: dict[nn.Parameter, set[str]] = {}
    _find_holders(model, ROOT, {module: name for name, module in modules.items()}, holders)
    plan = Plan(modules, {name: [] for name in modules}, [])
    for name, parameter in model.named_parameters():  # tied parameters once
        unit, *others = holders[parameter]
        own = plan.parameters[ROOT if others else unit]
        (plan.replicated if id(parameter) in apart else own).append(name)
    return plan


def _find_holders(
    module: nn.Module, unit: str, units: dict[nn.Module, str], holders: dict[nn.Parameter, set[str]]
) -> None:
    """Note for each parameter in which units it is used, also through modules that units share."""
    unit = units.get(module, unit)
    for parameter in module.parameters(recurse=False):
        holders.setdefault(parameter, set()).add(unit)
    for child in module.children():
        _find_holders(child, unit, units, holders)


def _check_wrappable(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if name_of(parameter) is not None:
            raise ValueError(f"{name!r} is sharded already: the model, or a part of it, is wrapped in FSDP")
        if type(parameter.data) is not torch.Tensor:
            raise ValueError(f"{name!r} is a {type(parameter.data).__name__}; only plain tensors can be sharded")
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(f"{name!r} has hooks, of another wrapper perhaps: call its remove_hooks() first")


def _find_units(model: nn.Module, units: Spec) -> dict[str, nn.Module]:
    """Return the units by name, in the model's order, without those that have no parameters."""
    names = {module: name for name, module in model.named_modules()}
    if units is None:
        chosen = list(dict.fromkeys(_blocks(model)))
    else:
        chosen = [module for entry in _entries(units, "units") for module in _modules(model, entry, names)]
        if not chosen:
            raise ValueError(
                "units is empty: name the parts of the model to be gathered one at a time, its blocks for example; "
                "[model] gathers the whole model at once, which saves no memory while it computes"
            )
    _check_apart([names[module] for module in chosen])
    for module in chosen:
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            raise ValueError(
                f"unit {names[module]!r} is a {type(module).__name__}, which is never called: pass what it holds"
            )
    wanted = set(chosen)
    return {
        name: module
        for name, module in model.named_modules()
        if module in wanted and name != ROOT and any(True for _ in module.parameters())
    }


def _find_replicated(model: nn.Module, replicated: Spec) -> list[nn.Parameter]:
    """Return the parameters that are given by their own names, or by modules, their names or their types."""
    names = {module: name for name, module in model.named_modules()}
    found: list[nn.Parameter] = []
    own = dict(model.named_parameters(remove_duplicate=False))
    for entry in _entries(replicated, "replicated"):
        if isinstance(entry, str) and entry in own:
            found.append(own[entry])
        else:
            found += [each for module in _modules(model, entry, names) for each in module.parameters()]
    return found


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The elements of the outermost lists of modules; without such lists the model's own children."""
    outermost: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and not any(
            over == ROOT or name.startswith(over + ".") for over in outermost
        ):
            outermost.append(name)
    for parent in [model.get_submodule(name) for name in outermost] or [model]:
        yield from (child for child in parent.children() if not isinstance(child, (nn.ModuleList, nn.ModuleDict)))


def _entries(spec: Spec, what: str) -> list[nn.Module | type | str]:
    if isinstance(spec, (nn.ModuleList, list, tuple, set, frozenset)) or not isinstance(spec, (nn.Module, type, str)):
        try:
            return list(spec)
        except TypeError:
            raise TypeError(f"{what} must be a list of modules, names or module types, not {spec!r}") from None
    raise TypeError(f"{what} must be a list: [{spec if isinstance(spec, str) else 'that'}]")


def _modules(model: nn.Module, entry: nn.Module | type | str, names: dict[nn.Module, str]) -> list[nn.Module]:
    if isinstance(entry, type) and issubclass(entry, nn.Module):
        if found := [module for module in names if isinstance(module, entry)]:
            return found
        raise ValueError(f"no module of the model is a {entry.__name__}")
    if isinstance(entry, str):
        for module, name in names.items():
            if name == entry:
                return [module]
        raise ValueError(f"the model has nothing called {entry!r}")
    if isinstance(entry, nn.Module):
        if entry in names:
            return [entry]
        raise ValueError(f"a {type(entry).__name__} that was given is not part of the model")
    raise TypeError(f"modules are given by themselves, by their names or types, not by {entry!r}")


def _check_apart(names: list[str]) -> None:
    for i, name in enumerate(names):
        for other in names[i + 1 :]:
            if name == other:
                raise ValueError(f"units overlap: {_quoted(name)} is given twice")
            inner, outer = max(name, other, key=len), min(name, other, key=len)
            if outer == ROOT or inner.startswith(outer + "."):
                raise ValueError(f"units overlap: {inner!r} lies inside {_quoted(outer)}; keep one of them")


def _quoted(name: str) -> str:
    return repr(name) if name else "the whole model"
