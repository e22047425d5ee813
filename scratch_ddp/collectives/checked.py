"""What comes before and after every collective: do all ranks ask for the same thing, and can it be done?

A rank whose argument is wrong must not raise alone, or the others wait for it for ever; and gloo ends ranks that send
each other different sizes. So the ranks first compare a digest of what they are about to do, in one all-reduce of
three integers, counted as set-up. Only where they differ do they gather what each of them asked for.
"""

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from scratch_ddp.collectives.scratch import scratch_memory
from scratch_ddp.common.accounting import set_up
from scratch_ddp.common.agreement import compare, digest, texts_by_rank

_compared = contextvars.ContextVar("whether ranks compare what they ask for", default=True)


def collective(writes: str, reads: str | None = None, root: str | None = None, sums: bool = False) -> Callable:
    """Decorate a collective written for contiguous tensors that all ranks agree on, so that it takes any tensors.

    `writes` and `reads` name the arguments with the result and the input, each a tensor or (`..._list`) one for each
    rank; `root` names the source or destination: on all other ranks lists must be None; `sums`: it adds the tensors up.

    Before the call: every rank raises TypeError or ValueError, with the same text, if any rank's arguments are wrong or
    the ranks disagree. Around the call: tensors that can't be sent as they are are replaced by copies, and the results
    copied back; autograd is off; what it takes with `scratch_like` is kept for the next call.
    """

    def decorate(function: Callable) -> Callable:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True  # IPython then shows the caller's line, not these
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            group = bound.arguments["group"] = member_group(bound.arguments["group"])
            asked = _Arguments(bound.arguments, group, writes, reads, root, sums)
            if _compared.get():
                agree(function.__name__, asked.check, group)
            else:
                asked.check()
            with torch.no_grad(), _staged(asked) as arguments, scratch_memory():
                result = function(**arguments)
            return None if result is None else asked.values[writes]

        return checked

    return decorate


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Inside, this thread's calls don't compare what the ranks ask for, which saves one small all-reduce per call.

    For a loop that is known to be right; every rank must enter and leave it. As with torch's own collectives, a rank
    whose argument is wrong raises alone, and ranks that ask for different things wait for each other until the group's
    timeout, or are ended by gloo.
    """
    before = _compared.set(False)
    try:
        yield
    finally:
        _compared.reset(before)


def member_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group itself, or the default group for None. Raises if this rank is not in it, or there is none."""
    if not dist.is_initialized():
        raise RuntimeError("there is no process group yet: call torch.distributed.init_process_group() first")
    if group is None:
        return dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"rank {dist.get_rank()} is not in the group it passes: only the group's ranks may call")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup or None, not {type(group).__name__} (of a mesh: .get_group())")
    return group


def agree(call: str, check: Callable[[], dict[str, Any]], group: dist.ProcessGroup) -> None:
    """Raise on every rank of `group` alike unless `check()` passes and returns the same facts on all of them.

    `call` is what messages call it. Raises TypeError if all checks that failed did, else ValueError; the text names the
    ranks. Costs one all-reduce of 24 bytes, counted as set-up.
    """
    __tracebackhide__ = True
    error, facts = None, {"call": call}
    try:
        facts |= check()
    except Exception as raised:  # whatever it is, this rank must not raise it alone
        error = (isinstance(raised, TypeError), str(raised))
    found = compare(group, same={"facts": digest([repr(facts)])}, numbers={"failed": error is not None})
    if not found.different and not found.largest["failed"]:
        return
    reports = [None] * dist.get_world_size(group)
    with set_up():
        dist.all_gather_object(reports, (facts, error), group=group)
    by_rank = dict(zip(dist.get_process_group_ranks(group), reports, strict=True))
    called = " / ".join(sorted({facts["call"] for facts, _ in reports}))
    errors = {rank: error for rank, (_, error) in by_rank.items() if error is not None}
    if errors:
        kind = TypeError if all(is_type_error for is_type_error, _ in errors.values()) else ValueError
        raise kind(f"{called}: {'; '.join(texts_by_rank({rank: text for rank, (_, text) in errors.items()}))}")
    facts_of = {rank: facts for rank, (facts, _) in by_rank.items()}
    raise ValueError(f"{called}: the ranks disagree. {_differences(facts_of)}")


def _differences(facts: dict[int, dict[str, Any]]) -> str:
    # Different calls have different facts, so then only the calls are compared.
    different_calls = len({each["call"] for each in facts.values()}) > 1
    names = ["call"] if different_calls else list(next(iter(facts.values())))
    lines = []
    for name in names:
        values = {rank: each[name] for rank, each in facts.items()}
        if len(set(map(repr, values.values()))) > 1:
            lines.append(f"{name}: {'; '.join(texts_by_rank(values))}")
    return "; ".join(lines)


@dataclass
class _Arguments:
    """One rank's arguments of a call, and the role of each (see `collective`)."""

    values: dict[str, Any]
    group: dist.ProcessGroup
    writes: str
    reads: str | None
    root: str | None
    sums: bool

    def check(self) -> dict[str, Any]:
        """Return what has to be the same on every rank. Raises TypeError or ValueError if the call can't be made."""
        facts = {}
        if self.root:
            facts[self.root] = self.check_root()
        tensors = [pair for name in (self.writes, self.reads) if name for pair in self.named_tensors(name)]
        for name, tensor in tensors:
            _check_tensor(name, tensor)
        first_name, first = tensors[0]
        for name, tensor in tensors[1:]:
            for what in ("shape", "dtype", "device"):
                here, there = getattr(tensor, what), getattr(first, what)
                if here != there:
                    raise ValueError(f"{name} has {what} {_show(here)}, but {first_name} has {_show(there)}")
        self.check_results()
        if self.sums:
            _check_summable(first.dtype)
        _transport(first.device, self.group)
        return facts | {"shape": _show(first.shape), "dtype": _show(first.dtype)}

    def check_root(self) -> int:
        at, members = self.values[self.root], dist.get_process_group_ranks(self.group)
        if not isinstance(at, int) or isinstance(at, bool):
            raise TypeError(f"{self.root} must be a rank, an int, not {type(at).__name__}")
        if at not in members:
            raise ValueError(f"{self.root}={at} is not in the group, whose ranks (global ones) are {members}")
        return at

    def named_tensors(self, name: str) -> list[tuple[str, Any]]:
        """[("tensor", …)], or one entry per tensor of a list, or none for a list that only the root has."""
        value, n = self.values[name], dist.get_world_size(self.group)
        if not name.endswith("_list"):
            return [(name, value)]
        if self.root and dist.get_rank() != self.values[self.root]:
            if value is not None:
                raise ValueError(f"{name} must be None where the rank is not {self.root}")
            return []
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"{name} must be a list of {n} tensors, not {type(value).__name__}")
        if len(value) != n:
            raise ValueError(f"{name} must have one tensor for each of the {n} ranks, not {len(value)}")
        return [(f"{name}[{i}]", tensor) for i, tensor in enumerate(value)]

    def check_results(self) -> None:
        """Refuse results that can't be written, or that would overwrite each other or an input that is not yet sent."""
        results = self.named_tensors(self.writes)
        owner: dict[int, int] = {}  # address -> which of the results lies there
        for i, (name, tensor) in enumerate(results):
            if tensor.requires_grad and torch.is_grad_enabled():
                raise ValueError(f"{name} requires grad: call under torch.no_grad(), or pass {name}.detach()")
            if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
                raise ValueError(f"{name} is expanded: its elements share memory; pass {name}.contiguous()")
            if tensor.numel() and (first := owner.setdefault(tensor.data_ptr(), i)) != i:
                raise ValueError(f"{name} is the same memory as {results[first][0]}: make a tensor for each rank")
        if self.writes.endswith("_list") and self.reads.endswith("_list"):
            for i, (name, tensor) in enumerate(self.named_tensors(self.reads)):
                result = owner.get(tensor.data_ptr())
                if result is not None and not result == i == dist.get_rank(self.group):
                    raise ValueError(f"{results[result][0]} is the same memory as {name}, which is still to be sent")


def _check_tensor(name: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise TypeError(f"{name} must be a dense tensor with data, not {tensor.layout} on {tensor.device}")


@functools.cache
def _check_summable(dtype: torch.dtype) -> None:
    if dtype is torch.bool:
        raise ValueError("a sum of bool is not a bool: pass .int(), or use torch.distributed with ReduceOp.BOR")
    try:
        torch.ones(1, dtype=dtype) + torch.ones(1, dtype=dtype)
    except RuntimeError:
        raise ValueError(f"torch can't add tensors of {_show(dtype)}: pass a copy in another dtype") from None


@contextlib.contextmanager
def _staged(asked: _Arguments) -> Iterator[dict[str, Any]]:
    """Yield the arguments with every tensor contiguous and on a device it can be sent from; then copy results back."""
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def stage(tensor: torch.Tensor, is_result: bool) -> torch.Tensor:
        ready = tensor.detach().resolve_conj().resolve_neg()  # the numbers themselves, not a lazily negated view
        ready = ready.to(_transport(tensor.device, asked.group)).contiguous()
        if is_result and ready.data_ptr() != tensor.data_ptr():
            copies.append((tensor, ready))
        return ready

    values = dict(asked.values)
    for name in filter(None, (asked.writes, asked.reads)):
        value, is_result = values[name], name == asked.writes
        if isinstance(value, torch.Tensor):
            values[name] = stage(value, is_result)
        elif value is not None:
            values[name] = [stage(tensor, is_result) for tensor in value]
    yield values
    for tensor, ready in copies:
        tensor.copy_(ready)


def _transport(device: torch.device, group: dist.ProcessGroup) -> torch.device:
    """Where tensors of `device` are sent from: from there, or from the CPU, as gloo's send takes CPU memory only."""
    backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
    if device.type == "cpu" and "cpu" in backends or backends.get(device.type) in ("nccl", "xccl"):
        return device
    if "cpu" in backends:
        return torch.device("cpu")
    raise ValueError(f"the group ({dist.get_backend_config(group)}) can't send tensors on {device}")


def _show(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")
