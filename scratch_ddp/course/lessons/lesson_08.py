"""Lesson 08, where communication can hide: averages that start from gradient hooks; what sticks out of a timeline."""

import functools
import time
import weakref
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.guard import GRADIENTS, HOOKS
from scratch_ddp.course.inputs.averaging import ObservedStep
from scratch_ddp.course.trial import Trial
from scratch_ddp.instruments.traffic.calls import Call


def average_when_ready(model):
    """Have every gradient averaged over the ranks while backward goes on.

    Return a function `finish`. In each step there is one backward, then `finish()`, and then every
    gradient that this backward computed is the mean. Others are left alone: those of frozen
    parameters (`requires_grad=False`), and of parameters that no rank uses in this step.
    Cost: one all-reduce for each gradient. It is started as soon as `.grad` is complete. Before
    `finish()`, nobody waits for it or asks whether it has ended. After it, neither handles nor
    gradients are kept.
    """
    works = []  # what is under way
    # What does a hook do when its gradient is complete, and what is left for finish()?
    # answer: begin

    def hook(parameter):
        parameter.grad /= dist.get_world_size()  # before the sum, which could be too large for half precision
        works.append(dist.all_reduce(parameter.grad, async_op=True))

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(hook)

    def finish():
        for work in works:
            work.wait()
        works.clear()

    # answer: end
    return finish


class _OddModel(nn.Module):
    """Parameters of its own and of its parts: without dimensions, transposed, tied, of two dtypes, inf, frozen.

    Its output is the sum of each parameter times a tensor, so that tensor is the parameter's gradient.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(torch.inf))
        self.first, self.last, self.sometimes = nn.Linear(4, 3), nn.Linear(4, 3).double(), nn.Linear(2, 1)
        self.first.weight = nn.Parameter(torch.zeros(4, 3).t())
        self.first.bias = self.last.bias
        self.last.weight.requires_grad_(False).grad = torch.full((3, 4), 7.0).double()  # from before it was frozen
        self.sometimes.bias.requires_grad_(False)
        self.to(device)

    def used(self, step: int) -> dict[str, nn.Parameter]:
        """The parameters whose gradients this step computes."""
        trained = {name: each for name, each in self.named_parameters() if each.requires_grad}
        return {name: each for name, each in trained.items() if step != 2 or not name.startswith("sometimes")}

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        half = gradients["first.bias"] / 2  # tied to last.bias: it is used twice
        named = dict(self.named_parameters(remove_duplicate=False))
        terms = {**gradients, "first.bias": half, "last.bias": half}
        return sum((named[name] * gradient).sum().double() for name, gradient in terms.items())


def _gradients(used: dict[str, nn.Parameter], rank: int, size: int, step: int) -> dict[str, torch.Tensor]:
    """Rank `rank`'s gradients of these parameters: whole numbers, times the ranks, so that any mean is exact."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    drawn = {
        name: torch.empty_like(each, requires_grad=False).copy_(
            2 * size * torch.randint(1, 1000, each.shape, generator=generator)
        )
        for name, each in used.items()
    }
    drawn["first.bias"] *= 1 + 2.0**-30  # float32 could not hold it
    if rank == 0:
        drawn["scale"].zero_()  # not so on the other ranks
        drawn["first.bias"][0] = torch.inf
    if rank == size - 1:
        drawn["first.bias"][1] = torch.nan
    return drawn


class _ObservedStep(ObservedStep):
    """Notices also a message that starts before any gradient is in `.grad`, which is empty at first."""

    early = False

    def started(self, call: Call) -> None:
        super().started(call)
        self.early |= all(parameter.grad is None for (parameter,) in self.buckets)


def examine_average_when_ready(trial: Trial) -> None:
    """V and A over four steps; C; overlap: all is started when backward returns, and nobody has waited; M."""
    model = _OddModel(trial.device)
    finish = trial.call(model, case="called with a model", changes=[HOOKS])
    observed = _ObservedStep([])
    for step in range(4 if trial.on_all_ranks else 2):
        used, unused = model.used(step), model.sometimes.weight
        everyones = [_gradients(used, rank, trial.size, step) for rank in range(trial.size)]
        mine = everyones[trial.rank]
        if handles := observed.kept():
            time.sleep(0.05)  # the thread that sent it may have held one a moment longer
            handles = observed.kept()
        before = [weakref.ref(parameter.grad) for parameter in used.values() if parameter.grad is not None]
        for parameter in used.values():
            parameter.grad = None
        left = None if unused.grad is None else unused.grad.clone()
        observed = _ObservedStep([[parameter] for parameter in used.values()])
        run = functools.partial(observed.run, functools.partial(model, mine))
        case = f"step {step}{', without sometimes.weight' if step == 2 else ''}"
        trial.call(finish, case=case, using=lambda _, finish, run=run: run(finish), beside=[model], changes=[GRADIENTS])
        trial.cost(calls={"all_reduce": len(used)})
        early = "an all-reduce was started before `.grad` was complete: there is another hook for that"
        trial.criterion("value", early if observed.early else "")
        trial.criterion("overlap", observed.exposed())
        if under_way := observed.calls - observed.waits:
            trial.criterion("value", f"finish() returned while {under_way} messages were under way")
            return
        kept = sum(gradient() is not None for gradient in before)
        trial.criterion("memory", handles or (f"keeps {kept} gradients of the step before" if kept else ""))
        for name, parameter in used.items():
            mean = sum(each[name] / trial.size for each in everyones)
            trial.value(parameter.grad, mean, f"the gradient of {name!r}")
        if step == 2:
            trial.value(unused.grad, left, "the gradient of 'sometimes.weight', which no rank used in this step,")
        trial.agreement([parameter.grad for parameter in used.values()])


AVERAGE_WHEN_READY = Exercise(average_when_ready, examine_average_when_ready)


def exposed_time(compute, communication):
    """Seconds, a float (or 0), in which something is on the wire and the rank does not compute.

    Both are lists of up to 100 (start, end) in seconds, in any order, perhaps empty. An end may equal
    its start. Messages may overlap, and one may lie inside another; so may stretches of computing.
    Time is counted from any moment, so it may be negative, or large. Nothing is rounded.
    Cost: nothing is sent.
    """
    # Between which moments does nothing begin or end?
    # answer: begin
    moments = sorted({moment for stretch in [*compute, *communication] for moment in stretch})
    exposed = 0.0
    for start, end in pairwise(moments):
        on_the_wire = any(a <= start and end <= b for a, b in communication)
        computing = any(a <= start and end <= b for a, b in compute)
        if on_the_wire and not computing:
            exposed += end - start
    return exposed
    # answer: end


_CASES = {  # case: (compute, communication, seconds)
    "a message after backward": ([(0.0, 4.0)], [(4.0, 7.0)], 3.0),
    "a message beside backward": ([(0.0, 4.0)], [(1.0, 3.0)], 0.0),
    "a tail": ([(0.0, 4.0)], [(1.0, 3.0), (3.0, 4.5)], 0.5),
    "a gap in computing": ([(5.0, 6.0), (0.0, 2.0)], [(1.0, 5.5)], 3.0),
    "computing in two threads": ([(0.0, 3.0), (2.0, 5.0)], [(1.0, 6.0)], 1.0),
    "two messages at once": ([(0.0, 1.0)], [(0.5, 3.0), (2.0, 4.0)], 3.0),
    "more computing than messages": ([(0.0, 10.0)], [(9.0, 12.0)], 2.0),
    "nothing on the wire": ([(0.0, 4.0)], [], 0.0),
    "nothing computed": ([], [(1.0, 2.0)], 1.0),
    "nothing at all": ([], [], 0.0),
    "a message inside another": ([(4.0, 5.0)], [(0.0, 4.0), (1.0, 2.0)], 4.0),
    "computing inside other computing": ([(0.0, 4.0), (1.0, 2.0)], [(3.0, 5.0)], 1.0),
    "a message before all computing": ([(5.0, 6.0)], [(0.0, 3.0)], 3.0),
    "computing that ends together": ([(0.0, 5.0), (3.0, 5.0), (9.0, 10.0), (6.0, 10.0)], [(0.0, 12.0)], 3.0),
    "computing that begins together": ([(0.0, 5.0), (0.0, 2.0), (6.0, 7.0), (6.0, 10.0)], [(0.0, 12.0)], 3.0),
    "messages that end together": ([(20.0, 21.0)], [(0.0, 5.0), (3.0, 5.0), (9.0, 10.0), (6.0, 10.0)], 9.0),
    "messages that begin together": ([(20.0, 21.0)], [(0.0, 5.0), (0.0, 2.0), (6.0, 7.0), (6.0, 10.0)], 9.0),
    "computing that takes no time": ([(0.0, 0.0), (0.5, 0.5)], [(0.0, 1.0)], 1.0),
}


def _drawn(generator: torch.Generator, number: int, hours: int, longest: int, lengths: int) -> tuple[list, list, int]:
    """`number` stretches each, and what `exposed_time` of them is, hour by hour. They begin and end on the hour.

    lengths: of an hour, at most. Every other one takes less than 10.
    """
    took = torch.randint(1, lengths + 1, (hours,), generator=generator)
    took[::2] = took[::2] % 10
    clock = [0, *took.cumsum(0).tolist()]

    def stretches() -> list[tuple[int, int]]:
        starts = torch.randint(0, hours - longest, (number,), generator=generator).tolist()
        lasting = torch.randint(0, longest + 1, (number,), generator=generator).tolist()
        return [(start, start + hours) for start, hours in zip(starts, lasting, strict=True)]

    by_hour = stretches(), stretches()
    compute, communication = ({hour for a, b in each for hour in range(a, b)} for each in by_hour)
    exposed = sum(clock[hour + 1] - clock[hour] for hour in communication - compute)
    return *([(clock[a], clock[b]) for a, b in each] for each in by_hour), exposed


def examine_exposed_time(trial: Trial) -> None:
    """V on stretches whose ends are exact in binary, each rank with others; C: nothing is sent."""
    stretches = {case: (float(trial.rank + 1), 0.0, given) for case, given in _CASES.items()}
    generator = torch.Generator().manual_seed(trial.seed + trial.rank)
    for unit, began, drawn in (
        (2.0**-10, -0.01171875, (8, 40, 4, 1)),
        (2.0**-21, 2.0**30, (8, 40, 12, 2**16)),
        (1.0, -20.0, (8, 40, 20, 1)),
        (2.0**-44, 0.0, (100, 200, 3, 2**44)),  # some hours take less than 1e-12 s, others more than float32 can add
    ):
        case = f"in units of {unit:g} s, from {began:g} s on, drawn with seed {trial.seed}"
        stretches[case] = unit, began, _drawn(generator, *drawn)
    cases = {
        case: tuple([(began + unit * a, began + unit * b) for a, b in each] for each in given[:2])
        for case, (unit, began, given) in stretches.items()
    }
    for result, (unit, _, given) in zip(trial.call_each(cases), stretches.values(), strict=True):
        trial.value(result, unit * given[2])
    trial.cost(calls={})


EXPOSED_TIME = Exercise(
    exposed_time,
    examine_exposed_time,
    given="from itertools import pairwise",
)
EXERCISES = (AVERAGE_WHEN_READY, EXPOSED_TIME)
