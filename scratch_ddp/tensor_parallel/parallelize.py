"""`parallelize`: change the layers of a model in place, as a plan says."""

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import TypeVar

import torch.distributed as dist
from torch import nn

from scratch_ddp.common.agreement import check_same_lines
from scratch_ddp.common.replicas import model_problem, named_tensors
from scratch_ddp.common.wrapper import Group, process_group
from scratch_ddp.tensor_parallel.checks import DIFFERENT, on_every_rank, values_of
from scratch_ddp.tensor_parallel.layers import ParallelLayer

Install = Callable[[], object]
Entry = Callable[[nn.Module, dist.ProcessGroup | None], nn.Module | Install]
Model = TypeVar("Model", bound=nn.Module)


def parallelize(model: Model, plan: Mapping[str, Entry], group: Group = None) -> Model:
    """Change a model in place so that each rank of `group` holds slices of it; return the model.

    `plan`: what becomes of the modules whose names end in each of its keys ("q_proj", "layers.0"); "" is the model
    itself. An entry is called with a module and the group. It returns the layer that takes the module's place, such as
    ColumnParallelLinear or functools.partial(ColumnParallelLinear, gather_output=True), or a function that changes the
    module, which is called once all entries have agreed. Parameters keep their names; tied ones stay tied.
    Every rank holds the whole model before. Make the optimizer afterwards.
    Raises ValueError on every rank, and leaves the model as it was, if an entry matches nothing or can't be followed on
    some rank, or if the ranks' models or plans differ. Costs two small all-reduces, and reads the model once. The
    slices are made before whole matrices are freed.
    """
    group = process_group(group)
    changes = on_every_rank(lambda: _prepare(model, plan, group), group)
    lines = [f"{ending!r}: {_text(entry)}" for ending, entry in plan.items()]
    check_same_lines([*lines, *values_of(named_tensors(model))], DIFFERENT, group)
    tied = _tied(model)
    for name, change in changes.items():
        if isinstance(change, nn.Module):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, change)
        else:
            change()
    for first, *others in tied:
        for other in others:
            _tie(model, first, other)
    return model


def _prepare(
    model: nn.Module, plan: Mapping[str, Entry], group: dist.ProcessGroup | None
) -> dict[str, nn.Module | Install]:
    """Return what each named module is to become. Changes nothing."""
    if problem := model_problem(model, group):
        raise ValueError(problem)
    names = dict(model.named_modules(remove_duplicate=False))
    changes: dict[str, nn.Module | Install] = {}
    for ending, entry in plan.items():
        found = [name for name in names if name == ending or (ending and name.endswith(f".{ending}"))]
        if not found:
            raise ValueError(f"the plan's {ending!r} matches no module; {_hint(ending, names)}")
        for name in found:
            if name in changes:
                raise ValueError(f"two entries of the plan match {name!r}")
            try:
                changes[name] = entry(names[name], group)
            except ValueError as error:
                raise ValueError(f"{name or 'the model'}: {error}") from None
    _check_tied(model, changes)
    return changes


def _hint(ending: str, names: Iterable[str]) -> str:
    last = sorted({name.rpartition(".")[2] for name in names if name and not name[-1].isdigit()})
    similar = get_close_matches(ending.rpartition(".")[2], last, n=1)
    return f"is {similar[0]} meant?" if similar else f"their names end in {', '.join(last)}"


def _tied(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [several for several in names.values() if len(several) > 1]


def _check_tied(model: nn.Module, changes: Mapping[str, nn.Module | Install]) -> None:
    for names in _tied(model):
        cuts = {}
        for name in names:
            module, _, parameter = name.rpartition(".")
            change = changes.get(module)
            cuts[name] = change.cuts.get(parameter) if isinstance(change, ParallelLayer) else None
        if len(set(cuts.values())) > 1:
            raise ValueError(f"{' and '.join(names)} are the same parameter: the plan must slice all of them alike")


def _tie(model: nn.Module, first: str, other: str) -> None:
    module, _, parameter = other.rpartition(".")
    setattr(model.get_submodule(module), parameter, model.get_parameter(first))


def _text(entry: Entry) -> str:
    if isinstance(entry, partial):
        return f"{_text(entry.func)} with {entry.keywords}"
    return getattr(entry, "__name__", type(entry).__name__)
