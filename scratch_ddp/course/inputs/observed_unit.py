"""Units of FSDP that see which memory is there while they compute, and what operations have made and kept."""

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.course.freed_memory import refuse_freed
from scratch_ddp.course.inputs.lasting import lasting
from scratch_ddp.course.outside import LeavingTorch
from scratch_ddp.instruments.traffic.intercept import LightMode, works_under_way

WIDTH = 6  # of what passes through a unit


class Seen(LightMode):
    """The memory of all tensors that operations have made while it was watching, and what has left torch."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._leaving, self._thread = LeavingTorch(), threading.get_ident()
        self._numbers, self._found = 0, ""

    def watching(self) -> contextlib.AbstractContextManager:
        self._leaving, self._numbers = LeavingTorch(), 0
        stack = contextlib.ExitStack()
        stack.enter_context(self)
        stack.enter_context(self._leaving)
        return stack

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        refuse_freed(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if threading.get_ident() == self._thread:
            self._numbers += func is torch.ops.aten._local_scalar_dense.default  # .item(), in backward too
            for each in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(each, torch.Tensor):
                    self._storages.add(each.untyped_storage())
        return result

    def as_large_as_a_unit(self, units: list["ObservedUnit"]) -> str:
        """That between forward and backward a tensor as large as a whole unit is there, as a complaint."""
        n = dist.get_world_size()
        own = {storage for unit in units for storage in unit.seen_storages}

        def found() -> str:
            for unit in units:
                if any(s.nbytes() in unit.whole_sizes(n) and s not in own for s in list(self._storages)):
                    return f"a tensor is kept that is as large as unit {unit.number} is whole"
            return ""

        complaint = lasting(found, 0.1)
        return complaint and f"between forward and backward {complaint}"

    def kept(self, when: str, own: set[torch.UntypedStorage], parts: int, elements: int) -> str:
        """That more than `parts` bytes are there beside `own`, or half of `elements` have left torch, as a complaint.

        A rank may keep a copy of its own parts, but nothing that is whole.
        """
        if self._found:  # it is still there
            return self._found
        self._leaving.few = few = max(elements // 2, 8)
        if self._numbers > few:
            return f"takes {self._numbers:,} elements out of torch by .item()"

        def too_much() -> int:
            left = sum(storage.nbytes() for storage in list(self._storages) if storage not in own)
            return left if left > parts else 0

        if lasting(too_much, 0.02):
            gc.collect()
        if left := lasting(too_much, 0.1):
            self._found = f"{when} {left:,} bytes are kept beside the shards and their gradients, should be 0"
        return self._found or self._leaving.complaint


class ObservedUnit(nn.Module):
    """Two layers that look, while they compute, which memory is there.

    They stop before they read memory that was freed, since that would end the process. Without hidden units: one
    number, and the output is a tuple, of which the sum of all but the first is passed on.
    """

    def __init__(self, number: int, hidden: int, device: torch.device, dtype: torch.dtype = torch.float64):
        super().__init__()
        self.gain = nn.Parameter(torch.empty(()))
        if hidden:
            self._add_layers(hidden)
        generator = torch.Generator().manual_seed(number)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1, 1, generator=generator)
        self.to(device, dtype)
        self.register_buffer("scale", torch.tensor([0.5, -0.0], dtype=torch.float32, device=device))
        self.number, self.elements = number, sum(parameter.numel() for parameter in self.parameters())
        self.dtype, self.itemsize, self._hidden = dtype, dtype.itemsize, hidden
        self._shapes = {name: tuple(parameter.shape) for name, parameter in self.named_parameters()}
        self.seen = torch.empty(0)  # the parameters' values in the last forward
        self.seen_storages: set[torch.UntypedStorage] = set()  # of these in all forwards
        self.passed: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()  # the memory of what it was given
        self.others: list[ObservedUnit] = []
        self._whole_beside: set[int] = set()  # numbers of units that were whole while this one computed
        self._read: list[weakref.ref[torch.UntypedStorage]] = []  # the parameters' memory in the last forward

    def _add_layers(self, hidden: int) -> None:
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH, bias=False)
        self.down.weight = nn.Parameter(torch.empty(hidden, WIDTH).t())  # transposed
        self.again = nn.Linear(WIDTH, hidden, bias=False).eval()
        self.again.weight = self.up.weight
        self.cube, self.none = (nn.Parameter(torch.empty(shape)) for shape in ((2, 1, 3), (0, 2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if others := {name for name, _ in self.named_parameters()} ^ self._shapes.keys():
            how = "has other parameters than before the call" if others & self._shapes.keys() else "has a new parameter"
            raise RuntimeError(f"in forward unit {self.number} {how}: {', '.join(map(repr, sorted(others)))}")
        for name, parameter in self.named_parameters():
            if (shape := tuple(parameter.shape)) != self._shapes[name]:
                should_be = f"should be {self._shapes[name]}"
                raise RuntimeError(f"unit {self.number} finds {name!r} of shape {shape} in forward, {should_be}")
        storages = self._storages()
        self._look("forward", [*storages, *(buffer.untyped_storage() for buffer in self.buffers())])
        self._read = [weakref.ref(storage) for storage in storages]
        with torch.no_grad():
            self.seen = torch.cat([parameter.flatten() for parameter in self.parameters()])
        self.seen_storages.add(self.seen.untyped_storage())
        self.passed.add(x.untyped_storage())
        if x.requires_grad:
            x = x.view_as(x)  # its gradient is the last to be computed here
            x.register_hook(lambda _: self._look("backward", self._storages()))
        change = self._change(x.to(self.dtype))
        if change.requires_grad:
            self._look_in_backward_of(change)
        half = 0.5 * (x + change)
        return (x + change) if self._hidden else (x.detach(), half.clone(), half)

    def _change(self, x: torch.Tensor) -> torch.Tensor:
        if not self._hidden:
            return x * self.gain
        up = self.up(x)
        self._look("forward", self._storages())  # a hook of the layer may have freed them
        hidden = torch.tanh(up + self.again(x))
        if hidden.requires_grad:
            self._look_in_backward_of(hidden)
        self._look("forward", self._storages())
        change = self.down(hidden) * self.scale[0].to(self.dtype)
        return change + self.gain + self.cube.flatten() + self.none.sum()

    def _look_in_backward_of(self, tensor: torch.Tensor) -> None:
        tensor.register_hook(lambda _: self._look("backward", [storage() for storage in self._read]))

    def whole_sizes(self, n: int) -> set[int]:
        """Bytes of all parameters together, with and without what fills up the last part; nothing if n is 1.

        Nor if it is as small as what passes through.
        """
        if n == 1 or self.elements < 5 * WIDTH:
            return set()
        return {self.itemsize * self.elements, self.itemsize * n * self.part_of(n)}

    def part_of(self, n: int) -> int:
        return -(-self.elements // n)

    def still_there(self, when: str) -> str:
        """That the parameters, or what autograd has saved of them, take memory, as a complaint."""
        storages = {*self._storages(), *(storage() for storage in self._read)} - {None}
        taken = sum(storage.nbytes() for storage in storages)
        return f"{when} unit {self.number} takes {taken:,} bytes, should be 0" if taken else ""

    def whole_beside(self) -> str:
        """That another unit was whole while this one computed, as a complaint."""
        others = self._whole_beside
        return f"unit {min(others)} is whole while unit {self.number} computes" if others else ""

    def gradients_there(self) -> str:
        """That whole gradients are left, as a complaint."""
        left = any(parameter.grad is not None for parameter in self.parameters())
        return f"after backward the parameters of unit {self.number} have a .grad, should be None" if left else ""

    def _storages(self) -> list[torch.UntypedStorage]:
        return [parameter.untyped_storage() for parameter in self.parameters() if parameter.numel()]

    def _look(self, moment: str, storages: list[torch.UntypedStorage | None]) -> None:
        for work, call in works_under_way().items():
            with contextlib.suppress(RuntimeError):  # it has failed: then it is over as well
                work.wait()  # else gloo may write into memory that is freed
            raise RuntimeError(
                f"unit {self.number} computes in {moment} while its {call.name} is under way: wait for it"
            )
        if not all(storage is not None and storage.nbytes() for storage in storages):
            text = f"unit {self.number} finds no memory in {moment}"
            if all(storage.nbytes() for storage in self._storages()):
                text += " where its forward had it: autograd has saved that memory, and the parameters have other now"
            raise RuntimeError(text)
        self._whole_beside |= {other.number for other in self.others if other.still_there("now")}


def acquainted(units: Iterable[ObservedUnit]) -> list[ObservedUnit]:
    units = list(units)
    for unit in units:
        unit.others = [other for other in units if other is not unit]
    return units
