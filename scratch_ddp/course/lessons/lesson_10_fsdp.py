"""Lesson 10, the last exercise: FSDP as four hooks."""

import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.guard import EVERYTHING
from scratch_ddp.course.trial import Trial
from scratch_ddp.instruments.traffic import ring_bytes

ELEMENT = 8  # bytes of a float64
WIDTH = 6  # of what passes through a unit


def shard_unit(module):
    """Make the module a unit of FSDP; return this rank's shard, the nn.Parameter left to train.

    All ranks hold equal modules, with parameters of one dtype and device. The module takes one
    tensor, which requires a gradient, and returns one. Its parameters are whole while its forward
    or its backward runs. After backward, shard.grad is this rank's part of the mean gradient, and
    the parameters' own .grad is None.
    Cost: an all-gather in forward, an all-gather and a reduce-scatter in backward. A rank's part
    has ⌈elements / n⌉ elements in each, as the shard has.
    Memory: at all other times the parameters take 0 bytes, and nothing keeps what they were.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    parameters = list(module.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    # One flat tensor for all parameters, and four hooks. What does each of them do?
    # answer: begin
    part = -(-sum(sizes) // n)
    padding = n * part - sum(sizes)

    def flatten(tensors):
        return nn.functional.pad(torch.cat([each.detach().flatten() for each in tensors]), (0, padding))

    whole = flatten(parameters)
    shard = nn.Parameter(whole.view(n, part)[rank].clone())
    for parameter, view in zip(parameters, whole.split([*sizes, padding]), strict=False):
        parameter.data = view.view_as(parameter)

    def gather():
        whole.untyped_storage().resize_(whole.nbytes)  # the views are valid again
        dist.all_gather(list(whole.split(part)), shard.detach())

    def free():
        whole.untyped_storage().resize_(0)

    def reduce():
        free()
        gradients = flatten(parameter.grad for parameter in parameters) / n
        shard.grad = torch.empty_like(shard)
        dist.reduce_scatter(shard.grad, list(gradients.split(part)))
        for parameter in parameters:
            parameter.grad = None

    free()
    module.register_forward_pre_hook(lambda *_: gather())
    module.register_forward_hook(lambda *_: free())
    module.register_full_backward_pre_hook(lambda *_: gather())
    module.register_full_backward_hook(lambda *_: reduce())
    return shard
    # answer: end


def examine_shard_unit(trial: Trial) -> None:
    """V and A of what units compute with, in three steps of SGD with momentum; C; M: one unit at a time, then none."""
    units, alone = _units(trial.device), _units(trial.device)
    shards = [_examine_shard(trial, unit) for unit in units]
    whole = [parameter for unit in alone for parameter in unit.parameters()]
    optimizer, plain = (torch.optim.SGD(trained, lr=0.25, momentum=0.5) for trained in (shards, whole))
    calls = {"all_gather": 2 * len(units), "reduce_scatter": len(units)}
    wire = sum(_wire_bytes(unit, trial) for unit in units)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(trial.size, 2, WIDTH, generator=generator, dtype=torch.float64).to(trial.device)
        complaint = trial.call(
            units, optimizer, inputs[trial.rank], case=f"step {step}", using=_step, changes=[EVERYTHING]
        )
        _step(None, alone, plain, inputs.flatten(0, 1))
        for unit, expected in zip(units, alone, strict=True):
            trial.value(unit.seen, expected.seen, f"unit {unit.number} in its forward", tolerance=1e-12)
            trial.agreement(unit.seen)
        trial.criterion("memory", complaint)
        trial.cost(calls=calls, max_wire_bytes=wire)


def _examine_shard(trial: Trial, unit: "_ObservedUnit") -> nn.Parameter:
    """V: it is a parameter; M: it has an n-th of the elements, and the whole ones have been freed."""
    shard = trial.call(unit, case=f"unit {unit.number}", using=_make_unit, changes=[EVERYTHING])
    size, budget = shard.numel(), unit.part_of(trial.size)
    trial.criterion("memory", f"the shard has {size} elements, budget {budget}" if size > budget else "")
    trial.criterion("memory", unit.still_there("after the call"))
    return shard


def _make_unit(answer: Callable, unit: "_ObservedUnit") -> nn.Parameter:
    shard = answer(unit)
    if not isinstance(shard, nn.Parameter):
        raise TypeError(f"the result is a {type(shard).__name__}, should be an nn.Parameter")
    if shard.untyped_storage().nbytes() < shard.nbytes:
        raise RuntimeError("the shard has no memory: it is a view of what was freed")
    return shard


def _wire_bytes(unit: "_ObservedUnit", trial: Trial) -> int:
    """What this rank sends in a step on a ring: two all-gathers and one reduce-scatter."""
    part = unit.part_of(trial.size) * ELEMENT
    gathered = ring_bytes("all_gather", part, trial.size, trial.rank)
    return 2 * gathered + ring_bytes("reduce_scatter", trial.size * part, trial.size, trial.rank)


def _step(_, units: list["_ObservedUnit"], optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> str:
    """Train one step. Return what was in memory and should not have been, as a complaint; "" if nothing was."""
    outputs = inputs.clone().requires_grad_()
    for unit in units:
        outputs = unit(outputs)
    complaints = [unit.still_there("between forward and backward") for unit in units]
    outputs.square().mean().backward()
    complaints += [unit.whole_beside() for unit in units]
    complaints += [unit.still_there("after backward") or unit.gradients_there() for unit in units]
    optimizer.step()
    optimizer.zero_grad()
    return next(filter(None, complaints), "")


class _ObservedUnit(nn.Module):
    """Two layers that look, while they compute, which memory is there.

    They stop before they read memory that was freed, since that would end the process.
    """

    def __init__(self, number: int, hidden: int, device: torch.device):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH, bias=False)
        generator = torch.Generator().manual_seed(number)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1, 1, generator=generator)
        self.double().to(device)
        self.number, self.elements = number, sum(parameter.numel() for parameter in self.parameters())
        self.seen = torch.empty(0)  # the parameters' values in the last forward
        self.others: list[_ObservedUnit] = []
        self._whole_beside: set[int] = set()  # numbers of units that were whole while this one computed
        self._read: list[weakref.ref[torch.UntypedStorage]] = []  # the parameters' memory in the last forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        storages = self._storages()
        self._look("forward", storages)
        self._read = [weakref.ref(storage) for storage in storages]
        self.seen = torch.cat([parameter.detach().flatten() for parameter in self.parameters()])
        change = self.down(torch.tanh(self.up(x)))
        change.register_hook(lambda _: self._look("backward", [storage() for storage in self._read]))
        return x + change

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
        return [parameter.untyped_storage() for parameter in self.parameters()]

    def _look(self, moment: str, storages: list[torch.UntypedStorage | None]) -> None:
        if not all(storage is not None and storage.nbytes() for storage in storages):
            text = f"unit {self.number} finds no memory in {moment}"
            if all(storage.nbytes() for storage in self._storages()):
                text += " where its forward had it: autograd has saved that memory, and the parameters have other now"
            raise RuntimeError(text)
        self._whole_beside |= {other.number for other in self.others if other.still_there("now")}


def _units(device: torch.device) -> list[_ObservedUnit]:
    """Three units, of 65, 39 and 26 elements, with the same values on every rank."""
    units = [_ObservedUnit(number, hidden, device) for number, hidden in enumerate((5, 3, 2), start=1)]
    for unit in units:
        unit.others = [other for other in units if other is not unit]
    return units


SHARD_UNIT = Exercise(
    shard_unit,
    examine_shard_unit,
    given="from torch import nn",
)
EXERCISES = (SHARD_UNIT,)
