"""Lesson 10, the last exercise: FSDP as four hooks."""

import contextlib
import gc
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.guard import EVERYTHING
from scratch_ddp.course.outside import LeavingTorch
from scratch_ddp.course.trial import Trial
from scratch_ddp.course.wording import bits
from scratch_ddp.instruments.traffic import ring_bytes
from scratch_ddp.instruments.traffic.intercept import LightMode, works_under_way

WIDTH = 6  # of what passes through a unit
_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


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
    inputs = [_inputs(trial, seed) for seed in range(6)]
    same = torch.stack([inputs[4][0]] * trial.size)
    odd = inputs[5].clone()
    odd[-1, 0, 0] = math.nan
    turns = {f"step {step}": _Turn(inputs[step]) for step in range(3)} | {
        "eval() and no_grad(), other weights loaded": _Turn(same, steps=False, training=False, factor=1.5),
        "huge gradients": _Turn(same, scale=1e308),
        "no_grad() after huge gradients": _Turn(same, steps=False),
    }
    small_turns = {
        "no_grad() before the first step": _Turn(same, steps=False),
        "small units, huge gradients": _Turn(same, scale=_largest_scale(_small_units(trial.device), same)),
        "small units, in eval() after huge gradients": _Turn(inputs[3], training=False),
        "small units, NaN in the inputs": _Turn(odd),
        "small units, after NaN": _Turn(same, steps=False),
    }
    _Pair(trial, _units).examine(turns)
    trial.end_if_wrong()
    _Pair(trial, _small_units).examine(small_turns)


def _largest_scale(units: list["_ObservedUnit"], inputs: torch.Tensor) -> float:
    """With the loss times this, each rank's gradients are numbers of float32, and the sum of two is not."""
    outputs = inputs.flatten(0, 1)
    for unit in units:
        outputs = unit(outputs)
    outputs.square().mean().backward()
    largest = max(p.grad.abs().max().item() for unit in units for p in unit.parameters() if p.numel())
    return 0.6 * torch.finfo(torch.float32).max / largest


def _inputs(trial: Trial, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(trial.size, 2, WIDTH, generator=generator, dtype=torch.float64).to(trial.device)


@dataclass
class _Turn:
    """What is done with units. inputs: of each rank. steps: train one step, with the gradients of the loss times
    `scale`; else two forwards under no_grad. training: the mode. factor: first of all the weights are multiplied."""

    inputs: torch.Tensor
    steps: bool = True
    scale: float = 1.0
    training: bool = True
    factor: float = 1.0


class _Pair:
    """Units for the answer, and the same for one process that has all inputs."""

    def __init__(self, trial: Trial, make: Callable[[torch.device], list["_ObservedUnit"]]):
        self._trial, self._seen = trial, _Seen()
        self._units, self._alone = make(trial.device), make(trial.device)
        self._before = [_state(unit) for unit in self._units]
        self._shards = self._sharded()
        whole = [parameter for unit in self._alone for parameter in unit.parameters()]
        self._optimizer, self._plain = (
            torch.optim.SGD(trained, lr=0.25, momentum=0.5) for trained in (self._shards, whole)
        )

    def _sharded(self) -> list[nn.Parameter]:
        """V: they are parameters; M: they have an n-th of the elements, and the whole ones have been freed."""
        trial, shards = self._trial, []

        def make(answer: Callable, unit: "_ObservedUnit") -> tuple[nn.Parameter, str]:
            with self._seen.watching(), _why_not_resizable():
                shards.append(_make_unit(answer, unit))
            own = {shard.untyped_storage() for shard in shards}
            left = self._seen.kept("after the call", own, unit.part_of(trial.size) * unit.itemsize, unit.elements)
            return shards[-1], unit.still_there("after the call") or left

        cases = {f"unit {unit.number}": (unit,) for unit in self._units}
        called = trial.call_each(cases, using=make, changes=[EVERYTHING])
        for unit, (shard, complaint) in zip(self._units, called, strict=True):
            size, budget = shard.numel(), unit.part_of(trial.size)
            trial.criterion("memory", f"the shard has {size} elements, budget {budget}" if size > budget else "")
            trial.criterion("memory", complaint)
        return shards

    def examine(self, turns: dict[str, _Turn]) -> None:
        trial, units = self._trial, self._units
        wire = sum(_wire_bytes(unit, trial) for unit in units)
        called = trial.call_each({case: (turn,) for case, turn in turns.items()}, self._take, changes=[EVERYTHING])
        tolerance = max(_TOLERANCE[unit.dtype] for unit in units)  # an error passes from unit to unit
        for turn, (complaint, seen) in zip(turns.values(), called, strict=True):
            _load(self._plain, turn.factor)
            if turn.steps:
                _step(self._alone, self._plain, turn.inputs.flatten(0, 1), turn)
            else:
                _forwards(self._alone, turn.inputs[trial.rank], turn)
            for unit, is_, should_be in zip(units, seen, self._alone, strict=True):
                trial.value(is_, should_be.seen, f"unit {unit.number} in its forward", tolerance=tolerance)
                trial.agreement(is_)
            trial.criterion("memory", complaint)
            calls = {"all_gather": 2 * len(units), "reduce_scatter": len(units) if turn.steps else 0}
            trial.cost(calls=calls, exactly=True, max_wire_bytes=wire)
        changed = [unit.number for unit, state in zip(units, self._before, strict=True) if _state(unit) != state]
        trial.criterion("untouched", f"the modes or the buffers of units {changed} have changed" if changed else "")

    def _take(self, _: Callable, turn: _Turn) -> tuple[str, list[torch.Tensor]]:
        """Return what was in memory and should not have been, as a complaint, and what each unit has computed with."""
        units, mine, complaints = self._units, turn.inputs[self._trial.rank], []
        _load(self._optimizer, turn.factor)

        def between() -> None:
            complaints.extend(unit.still_there("between forward and backward") for unit in units)
            complaints.append(self._seen.as_large_as_a_unit(units))

        def after() -> None:
            complaints.extend(unit.whole_beside() for unit in units)
            complaints.extend(unit.still_there("after backward") or unit.gradients_there() for unit in units)

        with _why_not_resizable():
            if turn.steps:
                _step(units, self._optimizer, mine, turn, between, after, self._seen.watching)
                complaints.append(self._kept("after backward"))
            else:
                with self._seen.watching():
                    _forwards(units, mine, turn)
                complaints.extend(unit.still_there("after a forward under no_grad()") for unit in units)
                complaints.append(self._kept("after a forward under no_grad()"))
        return next(filter(None, complaints), ""), [unit.seen for unit in units]

    def _kept(self, when: str) -> str:
        """That more is kept of what was made than the shards and their gradients, as a complaint."""
        own = {shard.untyped_storage() for shard in self._shards}
        own |= {shard.grad.untyped_storage() for shard in self._shards if shard.grad is not None}
        own |= {storage for unit in self._units for storage in unit.seen_storages}
        parts = sum(unit.part_of(self._trial.size) * unit.itemsize for unit in self._units)
        return self._seen.kept(when, own, parts, sum(unit.elements for unit in self._units))


def _load(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Replace the parameters' values, as if a checkpoint were loaded."""
    for parameter in optimizer.param_groups[0]["params"] if factor != 1.0 else ():
        parameter.data = parameter.data * factor


def _step(
    units: list["_ObservedUnit"],
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    turn: _Turn,
    between: Callable[[], None] = lambda: None,
    after: Callable[[], None] = lambda: None,
    watching: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> None:
    """Train one step. The gradients are divided by the turn's scale again before it."""
    with watching(), _in_mode(units, turn.training):
        outputs = inputs.clone().requires_grad_()
        for unit in units:
            outputs = unit(outputs)
        between()
        (outputs.square().mean() * turn.scale).backward()
        del outputs
        after()
    for parameter in optimizer.param_groups[0]["params"] if turn.scale > 1.0 else ():
        if parameter.grad is not None:
            parameter.grad.div_(turn.scale**0.5).div_(turn.scale**0.5)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def _forwards(units: list["_ObservedUnit"], inputs: torch.Tensor, turn: _Turn) -> None:
    with torch.no_grad(), _in_mode(units, turn.training):
        for _ in range(2):
            outputs = inputs
            for unit in units:
                outputs = unit(outputs)


@contextlib.contextmanager
def _in_mode(units: list["_ObservedUnit"], training: bool) -> Iterator[None]:
    """If not training: in eval mode, and afterwards in the modes of before."""
    modes = {module: module.training for unit in units for module in unit.modules()}
    for unit in units if not training else ():
        unit.eval()
    yield
    for module, mode in modes.items() if not training else ():
        module.training = mode


def _state(unit: "_ObservedUnit") -> list:
    """Modes, and buffers to the bit."""
    buffers = [(name, str(each.dtype), bits(each)) for name, each in unit.named_buffers()]
    return [*buffers, *(module.training for module in unit.modules())]


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
    part = unit.part_of(trial.size) * unit.itemsize
    gathered = ring_bytes("all_gather", part, trial.size, trial.rank)
    return 2 * gathered + ring_bytes("reduce_scatter", trial.size * part, trial.size, trial.rank)


class _Seen(LightMode):
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
        result = func(*args, **(kwargs or {}))
        if threading.get_ident() == self._thread:
            self._numbers += func is torch.ops.aten._local_scalar_dense.default  # .item(), in backward too
            for each in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(each, torch.Tensor):
                    self._storages.add(each.untyped_storage())
        return result

    def as_large_as_a_unit(self, units: list["_ObservedUnit"]) -> str:
        """That between forward and backward a tensor as large as a whole unit is there, as a complaint."""
        n = dist.get_world_size()
        own = {storage for unit in units for storage in unit.seen_storages}
        for unit in units:
            if any(s.nbytes() in unit.whole_sizes(n) and s not in own for s in list(self._storages)):
                return f"between forward and backward a tensor is kept that is as large as unit {unit.number} is whole"
        return ""

    def kept(self, when: str, own: set[torch.UntypedStorage], parts: int, elements: int) -> str:
        """That more than `parts` bytes are there beside `own`, or half of `elements` have left torch, as a complaint.

        A rank may keep a copy of its own parts, but nothing that is whole.
        """
        if self._found:  # it is still there
            return self._found
        self._leaving.few = few = max(elements // 2, 8)
        if self._numbers > few:
            return f"takes {self._numbers:,} elements out of torch by .item()"
        for attempt in range(50):  # gloo's threads release a tensor only shortly after its message
            left = sum(storage.nbytes() for storage in list(self._storages) if storage not in own)
            if left <= parts:
                return self._leaving.complaint
            if attempt == 10:
                gc.collect()
            time.sleep(0.002)
        self._found = f"{when} {left:,} bytes are kept beside the shards and their gradients, should be 0"
        return self._found


class _ObservedUnit(nn.Module):
    """Two layers that look, while they compute, which memory is there. Without hidden units: one number.

    They stop before they read memory that was freed, since that would end the process.
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
        self.others: list[_ObservedUnit] = []
        self._whole_beside: set[int] = set()  # numbers of units that were whole while this one computed
        self._read: list[weakref.ref[torch.UntypedStorage]] = []  # the parameters' memory in the last forward

    def _add_layers(self, hidden: int) -> None:
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH, bias=False)
        self.down.weight = nn.Parameter(torch.empty(hidden, WIDTH).t())  # transposed
        self.again = nn.Linear(WIDTH, hidden, bias=False).eval()
        self.again.weight = self.up.weight
        self.cube, self.none = (nn.Parameter(torch.empty(shape)) for shape in ((2, 1, 3), (0, 2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name, parameter in self.named_parameters():
            if tuple(parameter.shape) != self._shapes.get(name):
                is_, should_be = tuple(parameter.shape), self._shapes.get(name)
                raise RuntimeError(
                    f"unit {self.number} finds {name!r} of shape {is_} in forward, should be {should_be}"
                )
        storages = self._storages()
        self._look("forward", [*storages, *(buffer.untyped_storage() for buffer in self.buffers())])
        self._read = [weakref.ref(storage) for storage in storages]
        self.seen = torch.cat([parameter.detach().flatten() for parameter in self.parameters()])
        self.seen_storages.add(self.seen.untyped_storage())
        change = self._change(x.to(self.dtype))
        if change.requires_grad:
            self._look_in_backward_of(change)
        return x + change

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
    return _acquainted(_ObservedUnit(number, hidden, device) for number, hidden in enumerate((5, 3, 2), start=1))


def _small_units(device: torch.device) -> list[_ObservedUnit]:
    """Units of 20 elements and of one, which are fewer than there are ranks, of other dtypes."""
    kinds = (1, torch.float32), (0, torch.float32), (0, torch.bfloat16)
    return _acquainted(_ObservedUnit(4 + i, hidden, device, dtype) for i, (hidden, dtype) in enumerate(kinds))


def _acquainted(units: Iterable[_ObservedUnit]) -> list[_ObservedUnit]:
    units = list(units)
    for unit in units:
        unit.others = [other for other in units if other is not unit]
    return units


SHARD_UNIT = Exercise(
    shard_unit,
    examine_shard_unit,
    given="from torch import nn",
)
EXERCISES = (SHARD_UNIT,)
