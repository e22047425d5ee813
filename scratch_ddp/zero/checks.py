"""What a sharded optimizer refuses, and how it finds out that ranks disagree. Each check says the same on all ranks."""

import hashlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from scratch_ddp.common.accounting import set_up
from scratch_ddp.common.agreement import check_same_lines, gather_rows, message_device, raise_everywhere, rank_numbers
from scratch_ddp.zero import checks
from scratch_ddp.zero.owners import Owners

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


# FOLDED: Which parameters get a step: agreed upon by all ranks, who also learn there whether they disagree.


class Presence:
    """Asks before each step who has which gradients; before the first one, also whether they are the same."""

    def __init__(self, groups: checks.Groups, owners: Owners, group: dist.ProcessGroup | None):
        self.group, self.groups, self.owners = group, groups, owners
        self.named = checks.named_parameters(groups)
        self._kinds = [(parameter.dtype, tuple(parameter.shape)) for _, parameter in self.named]
        self._compared = False

    def with_gradient(self) -> list[torch.Tensor]:
        """Return the parameters that have a gradient on their owner: the same list on every rank.

        Raises ValueError on every rank if a gradient is sparse, if a parameter has become another one, if a rank has a
        gradient that its owner lacks, if ranks have other options, or if at the first step they have other gradients.
        Costs one all-reduce of two bytes a parameter and 65 more; at the first step an all-gather of 32 bytes each.
        """
        me = dist.get_rank(self.group)
        problem = self.refusal()
        here = [parameter.grad is not None for _, parameter in self.named]
        at_owner = [has and self.owners.of(p) == me for has, (_, p) in zip(here, self.named, strict=True)]
        options = hashlib.sha256("\n".join(map(checks.options_text, self.groups)).encode()).digest()
        complement = [255 - byte for byte in options]  # the largest options and the smallest, in one maximum
        refused, anywhere, at_owner, most, least = self._maximum([bool(problem)], here, at_owner, options, complement)
        if refused[0]:
            raise_everywhere(problem, self.group)
        if anywhere != at_owner:
            raise_everywhere(self._missing(here, at_owner), self.group)
        if any(a + b != 255 for a, b in zip(most, least, strict=True)):
            self._refuse_options()
        if not self._compared:
            raise_everywhere(self._other_gradient(here), self.group)
            self._compared = True
        return [parameter for (_, parameter), present in zip(self.named, at_owner, strict=True) if present]

    def refusal(self) -> str | None:
        """Say which parameter this rank can't step with or send, or return None."""
        for (name, parameter), then in zip(self.named, self._kinds, strict=True):
            now = (parameter.dtype, tuple(parameter.shape))
            if now != then:
                return (
                    f"{name} was {then[0]} {then[1]} when the optimizer was made and is {now[0]} {now[1]}: make it anew"
                )
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                return f"the gradient of {name} is sparse; only dense ones can be averaged"
        return None

    def _maximum(self, *parts: Iterable[int]) -> list[list[int]]:
        """The largest value over the ranks, place by place. One all-reduce."""
        parts = [list(part) for part in parts]
        with set_up():
            message = torch.tensor(sum(parts, []), dtype=torch.uint8, device=message_device(self.group))
            dist.all_reduce(message, dist.ReduceOp.MAX, group=self.group)
        return [part.tolist() for part in message.split([len(part) for part in parts])]

    def _missing(self, here: Sequence[bool], at_owner: Sequence[int]) -> str | None:
        """What this rank has to say where it has a gradient and the owner has none."""
        for (name, parameter), mine, owners in zip(self.named, here, at_owner, strict=True):
            if mine and not owners:
                return (
                    f"{name} has a gradient here, but none on {self._owner(parameter)}, which updates it: "
                    "average the gradients before step(), as sync_gradients() does"
                )
        return None

    def _refuse_options(self) -> None:
        lines = [f"group {number}: {checks.options_text(group)}" for number, group in enumerate(self.groups)]
        complaint = "the ranks step with different options; give schedulers the same numbers on every rank"
        check_same_lines(lines, complaint, self.group)

    def _other_gradient(self, here: Sequence[bool]) -> str | None:
        """Say which gradient differs from its owner's, where both ranks have one. One all-gather."""
        with set_up():
            rows = gather_rows(checks.digests(parameter.grad for _, parameter in self.named), self.group)
        mine = rows[dist.get_rank(self.group)]
        for place, (name, parameter) in enumerate(self.named):
            if here[place] and not torch.equal(mine[place], rows[self.owners.of(parameter)][place]):
                return (
                    f"{name} has another gradient than on {self._owner(parameter)}, which updates it: "
                    "average the gradients before step(), as sync_gradients() does"
                )
        return None

    def _owner(self, parameter: torch.Tensor) -> str:
        return f"rank {rank_numbers(self.group)[self.owners.of(parameter)]}"
