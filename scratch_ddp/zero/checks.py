"""What a sharded optimizer refuses, and how it finds out that ranks disagree. Each check says the same on all ranks."""

import hashlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from scratch_ddp.agreement import gather_rows, raise_everywhere, rank_numbers
from scratch_ddp.traffic import set_up

Groups = Sequence[Mapping[str, Any]]  # as in Optimizer.param_groups
REDUCED = "_reduced"  # an attribute of gradients that are means over the ranks, on their owners alone (ZeRO-2)
NO_OPTIONS = ("params", "param_names")  # all other entries of a group are options


def why_not_class(optimizer_cls: object, sharded: type) -> str | None:
    """Say why an optimizer class can't work on a share of the parameters, or return None if it can."""
    if isinstance(optimizer_cls, torch.optim.Optimizer):
        name = type(optimizer_cls).__name__
        return f"give the class and its options, ShardedOptimizer(params, {name}, lr=…), not an optimizer made from it"
    if not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, torch.optim.Optimizer)):
        return f"the second argument must be an optimizer class such as torch.optim.AdamW, not {optimizer_cls!r}"
    if issubclass(optimizer_cls, sharded):
        return "a sharded optimizer can't be sharded again: give the class it is made of, such as torch.optim.AdamW"
    closure = inspect.signature(optimizer_cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return (
            f"{optimizer_cls.__name__} evaluates the loss several times a step and looks at all parameters at once; "
            "only optimizers that update each parameter by itself can be sharded (SGD, Adam, AdamW, …)"
        )
    return None


def read_groups(params: Any) -> list[dict[str, Any]]:
    """Bring tensors, (name, tensor) pairs or groups of them into the form of `param_groups`, as torch's optimizers do.

    The caller's dictionaries are left as they are. Raises what torch raises: TypeError, ValueError.
    """
    if isinstance(params, torch.Tensor):
        raise TypeError("give an iterable of parameters, such as model.parameters(), not a single tensor")
    params = list(params)
    groups = [dict(group) for group in params] if params and isinstance(params[0], dict) else [{"params": params}]
    if groups == [{"params": []}]:
        raise ValueError("the optimizer got an empty list of parameters")
    return [torch.optim.Optimizer([group], {}).param_groups[0] for group in groups]


def named_parameters(groups: Groups) -> list[tuple[str, torch.Tensor]]:
    """Each parameter with what messages call it: its name where `named_parameters()` was given, else its place."""
    pairs = []
    for number, group in enumerate(groups):
        places = [f"parameter {place} of group {number}" for place in range(len(group["params"]))]
        names = [repr(name) for name in group.get("param_names", ())] or places
        pairs += zip(names, group["params"], strict=True)
    return pairs


def why_not_parameters(groups: Groups, known: Iterable[torch.Tensor], group: dist.ProcessGroup | None) -> str | None:
    """Say which of the parameters can't be updated by its owner and sent to the others, or return None."""
    backends = dist.get_backend_config(group)
    seen = set(known)
    for name, parameter in named_parameters(groups):
        if parameter in seen:
            return f"{name} is given twice"
        seen.add(parameter)
        if hasattr(parameter, "placements"):
            return f"{name} is a DTensor, so sharded already: give it to an ordinary optimizer"
        if torch.nn.parameter.is_lazy(parameter):
            return f"{name} has no shape yet: run one forward of the lazy module first"
        if parameter.is_meta:
            return f"{name} is on the meta device and has no values: give it some first (model.to_empty, then init)"
        if parameter.layout != torch.strided:
            return f"{name} is sparse; only dense parameters can be sent to the other ranks"
        if f"{parameter.device.type}:" not in backends:
            return f"{name} is on {parameter.device.type}, but the backend is {backends!r}: move the model first"
    return None


def describe(groups: Groups) -> list[str]:
    """A line for each group's options and for each parameter, with all that must be the same on every rank."""
    lines = []
    for group in groups:
        lines.append(f"a group with {options_text(group) or 'no options of its own'}")
        for name, parameter in named_parameters([group]):
            dtype = str(parameter.dtype).removeprefix("torch.")
            frozen = "" if parameter.requires_grad else ", frozen"
            lines.append(f"{name}: {dtype} {tuple(parameter.shape)}{frozen}")
    return lines


def options_text(group: Mapping[str, Any]) -> str:
    """A group's options in one line; those that only this process can name (functions, objects) by their type."""
    options = {name: value for name, value in group.items() if name not in NO_OPTIONS}
    return ", ".join(f"{name}={_plain(value)}" for name, value in sorted(options.items()))


def _plain(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(value.tolist())
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_plain, value))})"
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def check_same_values(groups: Groups, group: dist.ProcessGroup | None) -> None:
    """Raise ValueError on every rank, naming the first parameter, unless all ranks hold the first rank's bits.

    Reads each parameter once; costs one all-gather of 32 bytes a parameter.
    """
    pairs = named_parameters(groups)
    with set_up():
        rows = gather_rows(digests(parameter for _, parameter in pairs), group)
    different = (rows[dist.get_rank(group)] != rows[0]).any(dim=1).tolist()
    problem = next((name for (name, _), differs in zip(pairs, different, strict=True) if differs), None)
    if problem:
        problem += (
            f" has other values than on rank {rank_numbers(group)[0]}: every rank must hold the same parameters "
            "(set the same seed, or wrap the model first; the shards of FSDP go to an ordinary optimizer)"
        )
    raise_everywhere(problem, group)


def digests(tensors: Iterable[torch.Tensor | None]) -> torch.Tensor:
    """The SHA-256 of each tensor's bytes, zeros for None: uint8 (number of tensors, 32), in main memory."""
    rows = [bytes(32) if tensor is None else hashlib.sha256(_bytes(tensor)).digest() for tensor in tensors]
    return torch.tensor(list(b"".join(rows)), dtype=torch.uint8).view(-1, 32)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
