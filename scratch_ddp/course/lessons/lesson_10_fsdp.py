"""Lesson 10, the last exercise: FSDP as four hooks."""

import contextlib
import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.guard import EVERYTHING
from scratch_ddp.course.outside import LeavingTorch
from scratch_ddp.course.trial import Trial
from scratch_ddp.course.wording import bits
from scratch_ddp.instruments.memory import MemoryLedger
from scratch_ddp.instruments.traffic import ring_bytes
from scratch_ddp.instruments.traffic.intercept import works_under_way

ELEMENT = 8  # bytes of a float64
WIDTH = 6  # of what passes through a unit


def shard_unit(module):
    """Make the module a unit of FSDP; return this rank's shard, the nn.Parameter left to train.

    All ranks hold equal modules, with parameters of one dtype and any shapes, all used; a forward
    is followed by its backward, or runs under no_grad. The parameters are whole, as gathered from
    the shards, while forward or backward runs. After backward, shard.grad is this rank's part of
    the mean gradient, also where the sum would overflow, and the parameters' own .grad is None.
    Cost: an all-gather in forward, an all-gather and a reduce-scatter in backward. A rank's part
    has ⌈elements / n⌉ elements in each. Memory: at all other times the parameters take 0 bytes,
    and neither a tensor nor anything outside of torch keeps them or their gradients.
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
    """V and A of what units compute with, in three steps of SGD with momentum, and in odd ones; C; M."""
    units, alone = _units(trial.device), _units(trial.device)
    before = [_state(unit) for unit in units]
    shards = [_examine_shard(trial, unit) for unit in units]
    whole = [parameter for unit in alone for parameter in unit.parameters()]
    optimizer, plain = (torch.optim.SGD(trained, lr=0.25, momentum=0.5) for trained in (shards, whole))
    for step in range(3):
        inputs = _inputs(trial, step)
        _examine_step(trial, units, alone, (optimizer, plain), inputs, f"step {step}")
    for parameter in (*shards, *whole):
        parameter.data = parameter.data * 1.5  # as if a checkpoint were loaded
    complaint = trial.call(
        units,
        _inputs(trial, 3)[0],
        case="eval() and no_grad(), other weights loaded",
        using=_look,
        changes=[EVERYTHING],
    )
    _look(None, alone, _inputs(trial, 3)[0])
    _compare(trial, units, alone)
    trial.criterion("memory", complaint)
    changed = [unit.number for unit, state in zip(units, before, strict=True) if _state(unit) != state]
    trial.criterion("untouched", f"the modes or the buffers of units {changed} have changed" if changed else "")
    scale = 1e308
    huge = [torch.optim.SGD(trained, lr=0.25 / scale) for trained in (shards, whole)]
    same = [_inputs(trial, 4)[0]] * trial.size
    _examine_step(trial, units, alone, huge, torch.stack(same), "huge gradients", scale)
    odd = _inputs(trial, 5)
    odd[-1, 0, 0] = math.nan
    _examine_step(trial, units, alone, (optimizer, plain), odd, "after huge gradients, NaN in the inputs")
    complaint = trial.call(units, same[0], case="after NaN", using=_look, changes=[EVERYTHING])
    _look(None, alone, same[0])
    _compare(trial, units, alone)
    trial.criterion("memory", complaint)


def _inputs(trial: Trial, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(trial.size, 2, WIDTH, generator=generator, dtype=torch.float64).to(trial.device)


def _examine_step(
    trial: Trial, units: list, alone: list, optimizers: Sequence, inputs: torch.Tensor, case: str, scale: float = 1.0
) -> None:
    mine = inputs[trial.rank]
    looks = case == "step 1"  # to look at each operation takes time
    complaint = trial.call(units, optimizers[0], mine, scale, looks, case=case, using=_step, changes=[EVERYTHING])
    _step(None, alone, optimizers[1], inputs.flatten(0, 1), scale)
    _compare(trial, units, alone)
    trial.criterion("memory", complaint)
    calls = {"all_gather": 2 * len(units), "reduce_scatter": len(units)}
    trial.cost(calls=calls, max_wire_bytes=sum(_wire_bytes(unit, trial) for unit in units))


def _compare(trial: Trial, units: list, alone: list) -> None:
    for unit, expected in zip(units, alone, strict=True):
        trial.value(unit.seen, expected.seen, f"unit {unit.number} in its forward", tolerance=1e-12)
        trial.agreement(unit.seen)


def _look(_, units: list["_ObservedUnit"], inputs: torch.Tensor) -> str:
    """A forward alone. Return what was left in memory, as a complaint."""
    modes = [module.training for unit in units for module in unit.modules()]
    with torch.no_grad(), _why_not_resizable():
        for unit in units:
            inputs = unit.eval()(inputs)
    for module, mode in zip((module for unit in units for module in unit.modules()), modes, strict=True):
        module.training = mode
    return next(filter(None, (unit.still_there("after a forward under no_grad()") for unit in units)), "")


def _state(unit: "_ObservedUnit") -> list:
    """Modes, and buffers to the bit."""
    buffers = [(name, str(each.dtype), bits(each)) for name, each in unit.named_buffers()]
    return [*buffers, *(module.training for module in unit.modules())]


def _examine_shard(trial: Trial, unit: "_ObservedUnit") -> nn.Parameter:
    """V: it is a parameter; M: it has an n-th of the elements, and the whole ones have been freed."""
    leaving = LeavingTorch()

    def make(answer: Callable, unit: "_ObservedUnit") -> nn.Parameter:
        with leaving, _why_not_resizable():
            return _make_unit(answer, unit)

    leaving.few = unit.elements // 2
    shard = trial.call(unit, case=f"unit {unit.number}", using=make, changes=[EVERYTHING])
    size, budget = shard.numel(), unit.part_of(trial.size)
    trial.criterion("memory", f"the shard has {size} elements, budget {budget}" if size > budget else "")
    trial.criterion("memory", unit.still_there("after the call") or leaving.complaint)
    return shard


@contextlib.contextmanager
def _why_not_resizable() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "not resizable" in str(error):
            error.args = (f"{error.args[0]}: .numpy() has been taken of it",)
        raise


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


def _step(
    _,
    units: list["_ObservedUnit"],
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    scale: float,
    looks: bool = False,
) -> str:
    """Train one step. Return what was in memory and should not have been, as a complaint; "" if nothing was."""
    ledger = MemoryLedger(SimpleNamespace(), torch.uint8)
    ledger.unremarkable = 2**40  # what is there is asked at the end
    with ledger("step") if looks else contextlib.nullcontext(), _why_not_resizable():
        outputs = inputs.clone().requires_grad_()
        for unit in units:
            outputs = unit(outputs)
        complaints = [unit.still_there("between forward and backward") for unit in units]
        (outputs.square().mean() * scale).backward()
        del outputs
    complaints += [unit.whole_beside() for unit in units]
    complaints += [unit.still_there("after backward") or unit.gradients_there() for unit in units]
    complaints += [_kept(ledger, units)]
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return next(filter(None, complaints), "")


def _kept(ledger: MemoryLedger, units: list["_ObservedUnit"]) -> str:
    """That something as large as a unit's parameters was made in the step and is still there, as a complaint."""
    sizes = units[0].whole_sizes(dist.get_world_size())
    own = {unit.seen.untyped_storage() for unit in units}
    for _ in range(50):  # gloo's threads release a tensor only shortly after its message
        left = [storage.nbytes() for storage in ledger.storages() if storage.nbytes() in sizes and storage not in own]
        if not left:
            return ""
        time.sleep(0.002)
    return f"after backward a tensor of {left[0]:,} bytes is still there, as large as unit 1 is whole"


class _ObservedUnit(nn.Module):
    """Two layers that look, while they compute, which memory is there.

    They stop before they read memory that was freed, since that would end the process.
    """

    def __init__(self, number: int, hidden: int, device: torch.device):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH, bias=False)
        self.down.weight = nn.Parameter(torch.empty(hidden, WIDTH).t())  # transposed
        self.again = nn.Linear(WIDTH, hidden, bias=False).eval()
        self.again.weight = self.up.weight
        self.gain, self.cube, self.none = (nn.Parameter(torch.empty(shape)) for shape in ((), (2, 1, 3), (0, 2)))
        generator = torch.Generator().manual_seed(number)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1, 1, generator=generator)
        self.double().to(device)
        self.register_buffer("scale", torch.tensor([0.5, -0.0], dtype=torch.float32, device=device))
        self.number, self.elements = number, sum(parameter.numel() for parameter in self.parameters())
        self.seen = torch.empty(0)  # the parameters' values in the last forward
        self.others: list[_ObservedUnit] = []
        self._whole_beside: set[int] = set()  # numbers of units that were whole while this one computed
        self._read: list[weakref.ref[torch.UntypedStorage]] = []  # the parameters' memory in the last forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        storages = self._storages()
        self._look("forward", [*storages, *(buffer.untyped_storage() for buffer in self.buffers())])
        self._read = [weakref.ref(storage) for storage in storages]
        self.seen = torch.cat([parameter.detach().flatten() for parameter in self.parameters()])
        change = self.down(torch.tanh(self.up(x) + self.again(x))) * self.scale[0]
        change = change + self.gain + self.cube.flatten() + self.none.sum()
        if change.requires_grad:
            change.register_hook(lambda _: self._look("backward", [storage() for storage in self._read]))
        return x + change

    def whole_sizes(self, n: int) -> set[int]:
        """Bytes of all parameters together, with and without what fills up the last part; nothing if n is 1."""
        return {ELEMENT * self.elements, ELEMENT * n * self.part_of(n)} if n > 1 else set()

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


def _units(device: torch.device) -> list[_ObservedUnit]:
    """Three units, of 72, 46 and 33 elements, with the same values on every rank."""
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
