"""What a sharded optimizer checks, so that a mistake on any rank is the same error on every rank.

At construction, and when a group of parameters is added: the optimizer class, the parameters and their values.
At each step, in `Presence`: which parameters have gradients, the options, and that gradients were averaged.
"""

import hashlib
import inspect
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from scratch_ddp.common.accounting import set_up
from scratch_ddp.common.agreement import check_same_lines, compare, gather_rows, raise_everywhere, rank_numbers
from scratch_ddp.common.replicas import gradient_problem, tensor_problem
from scratch_ddp.common.tensors import bytes_of
from scratch_ddp.zero.owners import Owners

Groups = Sequence[Mapping[str, Any]]  # as in Optimizer.param_groups
SAMPLE = 8  # about as many elements of a gradient are compared at each step
NO_OPTIONS = ("params", "param_names")  # all other entries of a group are options


# At construction.


def class_problem(optimizer_cls: object, sharded: type) -> str | None:
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


def parameters_problem(groups: Groups, known: Iterable[torch.Tensor], group: dist.ProcessGroup | None) -> str | None:
    """Say which of the parameters can't be updated by its owner and sent to the others, or return None."""
    backends = dist.get_backend_config(group)
    seen = set(known)
    for name, parameter in named_parameters(groups):
        if parameter in seen:
            return f"{name} is given twice"
        seen.add(parameter)
        if hasattr(parameter, "placements"):
            return f"{name} is a DTensor, so sharded already: give it to an ordinary optimizer"
        if problem := tensor_problem(name, parameter, backends):
            return problem
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


def check_same_values(groups: Groups, group: dist.ProcessGroup | None) -> None:
    """Raise ValueError on every rank, naming the first parameter, unless all ranks hold the first rank's bits.

    Reads each parameter once; costs one all-gather of 32 bytes per parameter.
    """
    pairs = named_parameters(groups)
    rows = _gather_digests((parameter for _, parameter in pairs), group)
    different = (rows[dist.get_rank(group)] != rows[0]).any(dim=1).tolist()
    problem = next((name for (name, _), differs in zip(pairs, different, strict=True) if differs), None)
    if problem:
        problem += (
            f" differs in value from that on rank {rank_numbers(group)[0]}: every rank must hold the same parameters "
            "(set the same seed, or wrap the model first; the shards of FSDP go to an ordinary optimizer)"
        )
    raise_everywhere(problem, group)


# At each step.


class Presence:
    """Before each step, which parameters have a gradient; the ranks also learn there whether they disagree."""

    def __init__(self, groups: Groups, owners: Owners, group: dist.ProcessGroup | None):
        self.group, self.groups, self.owners = group, groups, owners
        self.named = named_parameters(groups)
        self._kinds = [(parameter.dtype, tuple(parameter.shape)) for _, parameter in self.named]
        self._compared = False  # gradients have been, at the first step

    def with_gradient(self) -> list[torch.Tensor]:
        """Return the parameters that have a gradient on their owner: the same list on every rank.

        Raises ValueError on every rank if a gradient is sparse, if a parameter's dtype or shape has changed, if a rank
        has a gradient that its owner lacks, if ranks have different options, or different gradients. At the first step
        these are compared whole, later in a few elements each. Costs one all-reduce of four bytes per parameter and 65
        more; at the first step also an all-gather of 32 bytes per parameter.
        """
        me, problem = dist.get_rank(self.group), self.problem()
        here = [parameter.grad is not None for _, parameter in self.named]
        at_owner = [has and self.owners.of(p) == me for has, (_, p) in zip(here, self.named, strict=True)]
        options = hashlib.sha256("\n".join(map(options_text, self.groups)).encode()).digest()
        samples = [0] * 2 * len(here) if problem else self._samples()
        found = compare(
            self.group,
            same=dict(enumerate(options)),  # byte by byte
            numbers={"refused": problem is not None},
            flags=[*here, *at_owner, *samples],
            dtype=torch.uint8,
        )
        anywhere, at_owner, highest, lowest = (found.flags[i * len(here) :][: len(here)] for i in range(4))
        if found.largest["refused"]:
            raise_everywhere(problem, self.group)
        if anywhere != at_owner:
            raise_everywhere(self._missing_at_owner(here, at_owner), self.group)
        if found.different:
            self._refuse_options()
        equal = [high + low == 255 for high, low, present in zip(highest, lowest, anywhere, strict=True) if present]
        if not (self._compared and all(equal)):
            raise_everywhere(self._different_at_owner(here), self.group)
            self._compared = True
        return [parameter for (_, parameter), present in zip(self.named, at_owner, strict=True) if present]

    def _samples(self) -> list[int]:
        """A byte for each gradient, made of a few of its elements, then 255 minus each; zeros where there is none."""
        rows = [None if each.grad is None else bytes_of(_few_elements(each.grad)) for _, each in self.named]
        present = [row for row in rows if row is not None]
        data = memoryview(torch.cat(present).cpu().numpy()) if present else memoryview(b"")  # one copy from a GPU
        low, high, end = [], [], 0
        for row in rows:
            begin, end = end, end + (0 if row is None else len(row))
            byte = zlib.crc32(data[begin:end]) & 255
            high.append(0 if row is None else byte)
            low.append(0 if row is None else 255 - byte)
        return [*high, *low]

    def problem(self) -> str | None:
        """Say which parameter this rank can't step with or send, or return None."""
        for (name, parameter), before in zip(self.named, self._kinds, strict=True):
            now = (parameter.dtype, tuple(parameter.shape))
            if now != before:
                was = f"{before[0]} {before[1]} when the optimizer was made"
                return f"{name} was {was} and is {now[0]} {now[1]}: make it anew"
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                return gradient_problem(name, parameter.grad)
        return None

    def _missing_at_owner(self, here: Sequence[bool], at_owner: Sequence[int]) -> str | None:
        """Say which gradient this rank has and its owner has not."""
        for (name, parameter), mine, owners in zip(self.named, here, at_owner, strict=True):
            if mine and not owners:
                return self._not_averaged(f"{name} has a gradient here, but none on", parameter)
        return None

    def _different_at_owner(self, here: Sequence[bool]) -> str | None:
        """Say which gradient differs from its owner's, where both ranks have one. One all-gather."""
        rows = _gather_digests((parameter.grad for _, parameter in self.named), self.group)
        mine = rows[dist.get_rank(self.group)]
        for place, (name, parameter) in enumerate(self.named):
            if here[place] and not torch.equal(mine[place], rows[self.owners.of(parameter)][place]):
                return self._not_averaged(f"{name} has a different gradient from that on", parameter)
        return None

    def _not_averaged(self, finding: str, parameter: torch.Tensor) -> str:
        owner = rank_numbers(self.group)[self.owners.of(parameter)]
        advice = "average the gradients before step(), as sync_gradients() does"
        return f"{finding} rank {owner}, which updates it: {advice}"

    def _refuse_options(self) -> None:
        lines = [f"group {number}: {options_text(group)}" for number, group in enumerate(self.groups)]
        complaint = "the ranks step with different options; give schedulers the same numbers on every rank"
        check_same_lines(lines, complaint, self.group)


def _few_elements(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, len(flat) // SAMPLE)]


# For both.


def named_parameters(groups: Groups) -> list[tuple[str, torch.Tensor]]:
    """Each parameter with what messages call it: its name where `named_parameters()` was given, else its place."""
    pairs = []
    for number, group in enumerate(groups):
        places = [f"parameter {place} of group {number}" for place in range(len(group["params"]))]
        names = [repr(name) for name in group.get("param_names", ())] or places
        pairs += zip(names, group["params"], strict=True)
    return pairs


def options_text(group: Mapping[str, Any]) -> str:
    """A group's options in one line; those that mean something in this process only (functions, objects) by type."""
    options = {name: value for name, value in group.items() if name not in NO_OPTIONS}
    return ", ".join(f"{name}={_value_text(value)}" for name, value in sorted(options.items()))


def _value_text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(value.tolist())
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_value_text, value))})"
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def _gather_digests(tensors: Iterable[torch.Tensor | None], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """From each rank the SHA-256 of each tensor's bytes, zeros for None: uint8 (number of tensors, 32)."""
    digests = [bytes(32) if each is None else hashlib.sha256(bytes_of(each).cpu().numpy()).digest() for each in tensors]
    with set_up():
        return gather_rows(torch.tensor(list(b"".join(digests)), dtype=torch.uint8).view(-1, 32), group)
