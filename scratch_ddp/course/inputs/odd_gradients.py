"""Gradients of every kind for the exercises of lessons 08 and 09, in worlds of any number of ranks in one process.

Each rank of a world has parameters of odd shapes and of several dtypes, and is given their gradients one by one, in an
order of its own. What they should be afterwards is then known without a model.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.course.inputs.every_kind import LARGE
from scratch_ddp.course.inputs.one_process import tried_in_worlds
from scratch_ddp.course.trial import Trial
from scratch_ddp.course.wording import bits

SHAPES = ((), (0,), (3,), (5, 4), (2, 3, 4), (4, 2, 3), (1, 1), (7,))
FIRST_DTYPES = torch.float64, torch.float16, torch.complex64
OTHER_DTYPES = torch.float32, torch.bfloat16, torch.complex128
NONE, ZEROS, OWN_ZEROS, VIEW_OF_ZEROS = "None", "zeros", "other zeros", "a view of zeros"  # how one is cleared

Lists = list  # of parameters, perhaps nested: what an answer is called with


@dataclass
class Case:
    """size: ranks of the world. parameters: makes a rank's. given: makes of them what each call of the answer gets.

    clearings: of which one is drawn for each gradient in each step, or the one that all have in each step, in turn.
    one_order: the gradients arrive in the same order on all ranks.
    """

    size: int
    parameters: Callable[[], list[nn.Parameter]]
    given: Callable[[list[nn.Parameter]], list[Lists]]
    clearings: Sequence[str]
    steps: int = 3
    drawn: bool = False
    one_order: bool = False


class _Rank:
    """One rank of a world: its parameters, and what they are given in each step."""

    def __init__(self, case: Case, rank: int, generator: torch.Generator):
        self.size, self.parameters = case.size, case.parameters()
        self.given = case.given(self.parameters)
        self.before = _copied(self.given)
        self.gradients = [
            [_gradient(each, rank, case.size, step, generator) for each in self.parameters]
            for step in range(case.steps)
        ]
        self.places: list[list[int]] = []  # of the gradients after each step
        self.in_backward: list[tuple[int, int]] = []  # by step: the messages started, and those waited for
        number = len(self.parameters)
        self.orders = [_order(case, self.parameters, step, generator) for step in range(case.steps)]
        self.clearings = []
        for step in range(case.steps):
            if case.drawn:
                which = torch.randint(len(case.clearings), (number,), generator=generator).tolist()
            else:
                which = [step % len(case.clearings)] * number
            self.clearings.append([case.clearings[each] for each in which])

    def train(self, answer: Callable) -> list[list[torch.Tensor | None]]:
        """Run all steps; return the gradients after each."""
        after_backward, seen = [answer(each) for each in self.given], []
        for gradients, order, clearings in zip(self.gradients, self.orders, self.clearings, strict=True):
            for parameter, how in zip(self.parameters, clearings, strict=True):
                _clear(parameter, how)
            group = dist.group.WORLD
            before = group.collectives, group.waits
            for i in order:
                self.parameters[i].backward(gradients[i])
            self.in_backward.append((group.collectives - before[0], group.waits - before[1]))
            for each in after_backward:
                each()
            self.places.append([each.grad.data_ptr() for each in self.parameters if each.grad is not None])
            seen.append([None if each.grad is None else each.grad.clone() for each in self.parameters])
        return seen


def examine_in_worlds(trial: Trial, cases: dict[str, Case], calls: Callable[[Case], int], stays: bool = False) -> None:
    """V on every rank after each step, A; untouched: the caller's lists; C: `calls` all-reduces in each step.

    stays: gradients lie in the same place after every step. Otherwise, overlap: all-reduces start in backward, where
    nobody waits.
    """
    everyone: dict[str, list[_Rank]] = {}

    def ranks(name: str) -> list[tuple[_Rank]]:
        generator = trial.generator()
        everyone[name] = [_Rank(cases[name], rank, generator) for rank in range(cases[name].size)]
        return [(each,) for each in everyone[name]]

    makers = {name: functools.partial(ranks, name) for name in cases}
    for name, world in tried_in_worlds(trial, makers, using=lambda answer, rank: rank.train(answer)):
        case, members = cases[name], everyone[name]
        budget = case.steps * calls(case)
        trial.criterion("cost", world.over_budget({"all_reduce": budget}, 1 << 60), world.place)
        for step in range(case.steps):
            means = [sum(parts) for parts in zip(*(_shares(each, step) for each in members), strict=True)]
            for rank, seen in enumerate(world.results):
                for i, (grad, mean) in enumerate(zip(seen[step], means, strict=True)):
                    what = f"{world.place} rank {rank}'s gradient of parameter {i} ({_described(mean)}) in step {step}"
                    if rank and grad is not None and bits(grad) == bits(world.results[0][step][i]):
                        continue
                    trial.value(grad, mean, what, max(1e-12, 8 * torch.finfo(mean.dtype).eps))
        for rank, each in enumerate(members):
            for started, waited in each.in_backward if not stays else ():
                complaint = f"{started} of {calls(case)} messages were started" if started < calls(case) else ""
                complaint = f"{waited} messages had been waited for, should be 0" if waited else complaint
                complaint = complaint and f"when backward returned, {complaint}"
                trial.criterion("overlap", complaint, f"{world.place} rank {rank}:")
            changed = "" if _same(each.given, each.before) else "has other entries than before"
            trial.criterion("untouched", changed, f"{world.place} rank {rank}'s list")
            if stays:
                moved = any(places != each.places[0] for places in each.places)
                complaint = "lie elsewhere than in the step before" if moved else ""
                trial.criterion("views", complaint, f"{world.place} rank {rank}'s gradients")


def _order(case: Case, parameters: list[nn.Parameter], step: int, generator: torch.Generator) -> list[int]:
    """Mixed in the same way on all ranks, or what one call was given after the other, in an order of each rank's own.

    If two calls' parameters came mixed in another way on each rank, the messages of the two would not fit.
    """
    if step % 2 == 0 or case.one_order:
        return torch.randperm(len(parameters), generator=torch.Generator().manual_seed(step)).tolist()
    place = {id(each): number for number, given in enumerate(case.given(parameters)) for each in _flat(given)}
    order = torch.randperm(len(parameters), generator=generator).tolist()
    return sorted(order, key=lambda i: place[id(parameters[i])])


def _flat(lists: Lists) -> list[nn.Parameter]:
    return [leaf for each in lists for leaf in (_flat(each) if isinstance(each, list) else [each])]


def parameters_of(*dtypes: torch.dtype) -> list[nn.Parameter]:
    """Of each dtype one in every shape: matrices are transposed; of two with three dimensions one has gaps."""
    return [nn.Parameter(_laid_out(torch.ones(shape, dtype=dtype))) for dtype in dtypes for shape in SHAPES]


def _laid_out(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() == 2:
        return tensor.mT.contiguous().mT
    if tensor.shape == (2, 3, 4):
        return tensor.repeat_interleave(2, dim=-1)[..., ::2]
    return tensor.permute(1, 2, 0).contiguous().permute(2, 0, 1) if tensor.dim() == 3 else tensor


def one_large() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(LARGE))]


def scalars(number: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(())) for _ in range(number)]


def _gradient(parameter: nn.Parameter, rank: int, n: int, step: int, generator: torch.Generator) -> torch.Tensor:
    """Every second step so large that two of them overflow, and halves of three; in the first, some NaN, inf or all 0.

    In the third all are 0 on the last rank: what is 0 counts and is sent as any other.
    """
    if step % 2:
        return torch.full_like(parameter, 0.9 * torch.finfo(parameter.dtype).max, requires_grad=False)
    gradient = torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)
    if step == 2 and rank == n - 1:
        return gradient.zero_()
    if parameter.shape == (7,) and not parameter.is_complex() and step == 0:
        gradient[rank % 7] = (math.nan, math.inf, -math.inf)[rank % 3]
    return gradient.zero_() if parameter.shape == (3,) else gradient


def _shares(rank: _Rank, step: int) -> list[torch.Tensor]:
    return [gradient / rank.size for gradient in rank.gradients[step]]


def _clear(parameter: nn.Parameter, how: str) -> None:
    if how == NONE or parameter.grad is None:
        parameter.grad = None
    elif how == ZEROS:
        parameter.grad.zero_()
    else:
        zeros = torch.zeros(parameter.numel() + 1, dtype=parameter.dtype)
        parameter.grad = torch.zeros_like(parameter) if how == OWN_ZEROS else zeros[1:].view(parameter.shape)


def _copied(lists: Lists) -> Lists:
    return [_copied(each) if isinstance(each, list) else each for each in lists]


def _same(lists: Lists, before: Lists) -> bool:
    """The same lists of the same parameters."""
    if isinstance(before, list):
        return isinstance(lists, list) and len(lists) == len(before) and all(map(_same, lists, before))
    return lists is before


def _described(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}"
