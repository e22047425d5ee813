"""Lesson 10, the last exercise: FSDP as four hooks."""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.guard import EVERYTHING
from scratch_ddp.course.inputs.every_kind import LARGE
from scratch_ddp.course.inputs.observed_unit import WIDTH, ObservedUnit, Seen, acquainted
from scratch_ddp.course.trial import Trial
from scratch_ddp.course.wording import bits
from scratch_ddp.instruments.traffic import ring_bytes

_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def shard_unit(module):
    """Make the module a unit of FSDP; return this rank's shard, the nn.Parameter left to train.

    All ranks hold equal modules, whose output is a tensor or a tuple of tensors. The parameters have
    one dtype, any shapes and strides, and no gradients yet. All are used; a forward is followed by
    its backward, and then its input requires a gradient, or it runs under no_grad. The parameters
    are whole, as gathered from the shards, while forward or backward runs. After backward,
    shard.grad is this rank's part of the mean gradient, whatever it held before, also where the sum
    would overflow; the parameters' own .grad is None.
    Cost: an all-gather in forward, an all-gather and a reduce-scatter in backward, nothing before.
    In each, a rank's part has ⌈elements / n⌉ elements. Memory: at all other times the parameters
    take 0 bytes, and nothing, in torch or outside of it, keeps them or their gradients.
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
    """V and A of what units compute with, in steps of SGD with momentum, and in odd ones; C; M."""
    inputs = [_inputs(trial, seed) for seed in range(4)]
    same = torch.stack([inputs[2][0]] * trial.size)
    if not trial.on_all_ranks:
        large = _Pair(trial, _large_unit)
        large.examine(
            {
                "a large unit, huge gradients": large.huge(same),
                "a large unit, after huge gradients": _Turn(inputs[0], forwards=1),
            }
        )
        return
    odd = inputs[3].clone()
    odd[-1, 0, 0] = math.nan
    units = _Pair(trial, _units)
    units.examine(
        {
            "step 0": _Turn(inputs[0]),
            "gradients of 0 and an old shard.grad": _Turn(inputs[1], scale=0.0, old_gradient=3.0),
            "huge gradients, after gradients of 0 and an old shard.grad": units.huge(same, cleared=True),
            "after huge gradients, eval() and no_grad(), other weights loaded": _Turn(
                same, forwards=1, training=False, factor=1.5
            ),
        }
    )
    trial.end_if_wrong()
    small = _Pair(trial, _small_units)
    small.examine(
        {
            "no_grad() before the first step": _Turn(same, forwards=2),
            "small units, huge gradients, NaN in the old ones": small.huge(same, old_gradient=math.nan),
            "small units, in eval() after huge gradients, NaN in the inputs": _Turn(odd, training=False),
            "small units, after NaN": _Turn(same, forwards=1),
        }
    )


def _inputs(trial: Trial, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(trial.size, 2, WIDTH, generator=generator, dtype=torch.float64).to(trial.device)


@dataclass
class _Turn:
    """What is done with units. inputs: of each rank. forwards: so many under no_grad; 0: train one step, with the
    gradients of the loss times `scale`. training: the mode. factor: first of all the weights are multiplied.
    old_gradient: what every .grad holds before."""

    inputs: torch.Tensor
    forwards: int = 0
    scale: float = 1.0
    training: bool = True
    factor: float = 1.0
    old_gradient: float = 0.0
    cleared: bool = False  # whether .grad is None before


class _Pair:
    """Units for the answer, and the same for one process that has all inputs."""

    def __init__(self, trial: Trial, make: Callable[[torch.device], list["ObservedUnit"]]):
        self._trial, self._seen = trial, Seen()
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

        def make(answer: Callable, unit: "ObservedUnit") -> tuple[nn.Parameter, str]:
            with self._seen.watching(), _why_not_resizable():
                shards.append(_make_unit(answer, unit))
            own = {each.untyped_storage() for shard in shards for each in (shard, shard.grad) if each is not None}
            left = self._seen.kept("after the call", own, unit.part_of(trial.size) * unit.itemsize, unit.elements)
            return shards[-1], unit.still_there("after the call") or left

        cases = {f"unit {unit.number}": (unit,) for unit in self._units}
        called = trial.call_each(cases, using=make, changes=[EVERYTHING])
        for unit, (shard, complaint) in zip(self._units, called, strict=True):
            size, budget = shard.numel(), unit.part_of(trial.size)
            trial.criterion("memory", f"the shard has {size} elements, budget {budget}" if size > budget else "")
            trial.criterion("memory", complaint)
            trial.cost(calls={})
        return shards

    def huge(self, inputs: torch.Tensor, **others: Any) -> _Turn:
        """A step, of new units, in which the largest gradient of a rank is finite, and the sum of two is not.

        inputs: the same on every rank. others: of `_Turn`.
        """
        outputs = _through(self._alone, inputs[0])
        whole = [parameter for unit in self._alone for parameter in unit.parameters() if parameter.numel()]
        largest = max(each.abs().max().item() for each in torch.autograd.grad(outputs.square().mean(), whole))
        scale = 0.6 * torch.finfo(self._alone[0].dtype).max / largest
        return _Turn(inputs, scale=scale, **others)

    def examine(self, turns: dict[str, _Turn]) -> None:
        trial, units = self._trial, self._units
        wire = sum(_wire_bytes(unit, trial) for unit in units)
        called = trial.call_each({case: (turn,) for case, turn in turns.items()}, self._take, changes=[EVERYTHING])
        tolerance = max(_TOLERANCE[unit.dtype] for unit in units)  # an error passes from unit to unit
        for turn, (complaint, seen) in zip(turns.values(), called, strict=True):
            _load(self._plain, turn.factor)
            if turn.forwards:
                _forwards(self._alone, turn.inputs[trial.rank], turn)
            else:
                _step(self._alone, self._plain, turn.inputs.flatten(0, 1), turn)
            for unit, is_, should_be in zip(units, seen, self._alone, strict=True):
                trial.value(is_, should_be.seen, f"unit {unit.number} in its forward", tolerance=tolerance)
                trial.agreement(is_)
            trial.criterion("memory", complaint)
            calls = {"all_gather": (turn.forwards or 2) * len(units)}
            calls["reduce_scatter"] = 0 if turn.forwards else len(units)
            trial.cost(calls=calls, exactly=True, max_wire_bytes=wire)
        changed = [unit.number for unit, state in zip(units, self._before, strict=True) if _state(unit) != state]
        trial.criterion("untouched", f"the modes or the buffers of units {changed} have changed" if changed else "")

    def _take(self, _: Callable, turn: _Turn) -> tuple[str, list[torch.Tensor]]:
        """Return what was in memory and should not have been, as a complaint, and what each unit has computed with."""
        units, mine, complaints = self._units, turn.inputs[self._trial.rank], []
        _load(self._optimizer, turn.factor)
        for shard in self._shards if turn.cleared or turn.old_gradient else ():
            shard.grad = None if turn.cleared else torch.full_like(shard, turn.old_gradient)

        def between() -> None:
            complaints.extend(unit.still_there("between forward and backward") for unit in units)
            complaints.append(self._seen.as_large_as_a_unit(units))

        def after() -> None:
            complaints.extend(unit.whole_beside() for unit in units)
            complaints.extend(unit.still_there("after backward") or unit.gradients_there() for unit in units)

        with _why_not_resizable():
            if turn.forwards:
                with self._seen.watching():
                    _forwards(units, mine, turn)
                complaints.extend(unit.still_there("after a forward under no_grad()") for unit in units)
                complaints.append(self._kept("after a forward under no_grad()"))
            else:
                _step(units, self._optimizer, mine, turn, between, after, self._seen.watching)
                complaints.append(self._kept("after backward"))
        return next(filter(None, complaints), ""), [unit.seen for unit in units]

    def _kept(self, when: str) -> str:
        """That more is kept of what was made than the shards and their gradients, as a complaint."""
        own = {shard.untyped_storage() for shard in self._shards}
        own |= {shard.grad.untyped_storage() for shard in self._shards if shard.grad is not None}
        for unit, shard in zip(self._units, self._shards, strict=True):
            most = 2 * unit.part_of(self._trial.size) * unit.itemsize  # a copy of its own part it may keep
            held = 0 if shard.grad is None else shard.grad.untyped_storage().nbytes()
            if held > most:
                return f"{when} shard.grad of unit {unit.number} is a part of {held:,} bytes, budget {most:,}"
        own |= {storage for unit in self._units for storage in (*unit.seen_storages, *unit.passed)}
        parts = sum(unit.part_of(self._trial.size) * unit.itemsize for unit in self._units)
        return self._seen.kept(when, own, parts, sum(unit.elements for unit in self._units))


def _load(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Replace the parameters' values, as if a checkpoint were loaded."""
    for parameter in optimizer.param_groups[0]["params"] if factor != 1.0 else ():
        parameter.data = parameter.data * factor


def _step(
    units: list["ObservedUnit"],
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    turn: _Turn,
    between: Callable[[], None] = lambda: None,
    after: Callable[[], None] = lambda: None,
    watching: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> None:
    """Train one step. The gradients are divided by the turn's scale again before it."""
    with watching(), _in_mode(units, turn.training):
        outputs = _through(units, inputs.clone().requires_grad_())
        between()
        (outputs.square().mean() * turn.scale).backward()
        del outputs
        after()
    for parameter in optimizer.param_groups[0]["params"] if turn.scale > 1.0 else ():
        if parameter.grad is not None:
            parameter.grad.div_(turn.scale**0.5).div_(turn.scale**0.5)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def _forwards(units: list["ObservedUnit"], inputs: torch.Tensor, turn: _Turn) -> None:
    with torch.no_grad(), _in_mode(units, turn.training):
        for _ in range(turn.forwards):
            _through(units, inputs)


def _through(units: list["ObservedUnit"], inputs: torch.Tensor) -> torch.Tensor:
    """What the units put out, one after the other."""
    outputs = inputs
    for unit in units:
        outputs = unit(outputs)
        outputs = sum(outputs[1:]) if isinstance(outputs, tuple) else outputs
    return outputs


@contextlib.contextmanager
def _in_mode(units: list["ObservedUnit"], training: bool) -> Iterator[None]:
    """If not training: in eval mode, and afterwards in the modes of before."""
    modes = {module: module.training for unit in units for module in unit.modules()}
    for unit in units if not training else ():
        unit.eval()
    yield
    for module, mode in modes.items() if not training else ():
        module.training = mode


def _state(unit: "ObservedUnit") -> list:
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


def _make_unit(answer: Callable, unit: "ObservedUnit") -> nn.Parameter:
    shard = answer(unit)
    if not isinstance(shard, nn.Parameter):
        raise TypeError(f"the result is a {type(shard).__name__}, should be an nn.Parameter")
    if not shard.requires_grad:
        raise RuntimeError("the shard requires no gradient, so nobody would train it")
    if shard.untyped_storage().nbytes() < shard.nbytes:
        raise RuntimeError("the shard has no memory: it is a view of what was freed")
    return shard


def _wire_bytes(unit: "ObservedUnit", trial: Trial) -> int:
    """What this rank sends in a step on a ring: two all-gathers and one reduce-scatter."""
    part = unit.part_of(trial.size) * unit.itemsize
    gathered = ring_bytes("all_gather", part, trial.size, trial.rank)
    return 2 * gathered + ring_bytes("reduce_scatter", trial.size * part, trial.size, trial.rank)


def _units(device: torch.device) -> list[ObservedUnit]:
    """Two units, of 46 and 33 elements, with the same values on every rank."""
    return acquainted(ObservedUnit(number, hidden, device) for number, hidden in enumerate((3, 2), start=1))


def _small_units(device: torch.device) -> list[ObservedUnit]:
    """Units of 20 elements and of one, which are fewer than there are ranks, of other dtypes."""
    kinds = (1, torch.float32), (0, torch.bfloat16)
    return acquainted(ObservedUnit(4 + i, hidden, device, dtype) for i, (hidden, dtype) in enumerate(kinds))


def _large_unit(device: torch.device) -> list[ObservedUnit]:
    """A unit of a few more than LARGE elements. Neither 2, 3 nor 4 ranks can share them without a remainder."""
    return acquainted([ObservedUnit(6, LARGE // (2 * WIDTH + 1) + 3, device, torch.float32)])


SHARD_UNIT = Exercise(
    shard_unit,
    examine_shard_unit,
    given="from torch import nn",
)
EXERCISES = (SHARD_UNIT,)
