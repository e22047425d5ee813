"""The arguments of a collective: are they right on this rank, and in memory that can be sent from?"""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass
class Arguments:
    """One rank's arguments of a call, and which of them are what (see `collective`)."""

    values: dict[str, Any]
    group: dist.ProcessGroup
    writes: str
    reads: str | None
    root: str | None
    sums: bool

    def check(self) -> dict[str, Any]:
        """Return what has to be the same on every rank. Raises TypeError or ValueError if it can't be done."""
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
        """[("tensor", …)], or of a list one entry a rank, or nothing for a list that only the root has."""
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
        """Refuse results that can't be written, or that would overwrite each other or an input still to be sent."""
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
def staged(asked: Arguments) -> Iterator[dict[str, Any]]:
    """Yield the arguments with every tensor contiguous and where it can be sent from; then copy the results back."""
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def stage(tensor: torch.Tensor, is_result: bool) -> torch.Tensor:
        ready = tensor.detach().resolve_conj().resolve_neg()  # the numbers themselves, not a view that negates them
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
    """Where tensors of `device` are sent from: there, or from the CPU, since gloo's send takes CPU memory only."""
    backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
    if device.type == "cpu" and "cpu" in backends or backends.get(device.type) in ("nccl", "xccl"):
        return device
    if "cpu" in backends:
        return torch.device("cpu")
    raise ValueError(f"the group ({dist.get_backend_config(group)}) can't send tensors on {device}")


def _show(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")
