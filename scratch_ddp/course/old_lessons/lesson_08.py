"""Lesson 08, where communication can hide: averages that start from gradient hooks."""

import functools
import time
import weakref
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.guard import GRADIENTS, HOOKS
from scratch_ddp.course.inputs.averaging import ObservedStep
from scratch_ddp.course.inputs.odd_gradients import NONE, Case, examine_in_worlds, one_large, parameters_of, scalars
from scratch_ddp.course.outside import LeavingTorch
from scratch_ddp.course.trial import Trial
from scratch_ddp.instruments.traffic import ring_bytes
from scratch_ddp.instruments.traffic.calls import Call
from scratch_ddp.instruments.traffic.intercept import LightMode, works_under_way


def average_when_ready(model):
    """Have every gradient averaged over the ranks while backward goes on.

    Return a function `finish`. In each step there is one backward, then `finish()`, and then every
    gradient that this backward computed is the mean, also where the sum over the ranks would be too
    large for its dtype. Others are left alone: those of frozen parameters
    (`requires_grad=False`), and of parameters that no rank uses in this step. Gradients may arrive in
    another order in each step, but it is the same on all ranks. The model keeps no hooks but those of
    its trainable parameters.
    Cost: one all-reduce for each gradient, in its own dtype. It is started as soon as `.grad` is
    complete. Before `finish()`, nobody waits for it or asks whether it has ended. After it, neither
    handles nor gradients are kept, nor copies of them.
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
    """Parameters of its own, of its parts and of theirs: without dimensions, large and transposed, tied, of several
    dtypes, two of one shape, inf, empty, frozen, never used.

    Its output is the sum of each parameter times a tensor, so that tensor is the parameter's gradient.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(torch.inf))
        self.first, self.last, self.sometimes = nn.Linear(4, 3), nn.Linear(4, 3).double(), nn.Linear(2, 1)
        self.first.weight = nn.Parameter(torch.zeros(128, 96).t())
        self.first.bias = self.last.bias
        self.last.weight.requires_grad_(False).grad = torch.full((3, 4), 7.0).double()  # from before it was frozen
        self.sometimes.bias.requires_grad_(False)
        self.never, self.empty = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(0, 2))
        self.first.weight.grad = torch.zeros_like(self.first.weight)  # it has been trained before
        self.deep = nn.Sequential(nn.Sequential(nn.Module()))
        self.deep[0][0].weight = nn.Parameter(torch.zeros(3, dtype=torch.float16))
        self.deep[0][0].bias = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
        self.to(device)

    def used(self, step: int, generator: torch.Generator, on_all_ranks: bool) -> dict[str, nn.Parameter]:
        """The parameters whose gradients this step computes, in the order in which they are computed."""
        trained = {name: each for name, each in self.named_parameters() if each.requires_grad and name != "never"}
        left_out = ("deep", "sometimes") if step == WITHOUT or not on_all_ranks else ()  # a message takes milliseconds
        names = [name for name in trained if not name.startswith(left_out)]
        return {names[place]: trained[names[place]] for place in torch.randperm(len(names), generator=generator)}

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        half = gradients["first.bias"] / 2  # tied to last.bias: it is used twice
        named = dict(self.named_parameters(remove_duplicate=False))
        terms = {**gradients, "first.bias": half, "last.bias": half}
        return sum((named[name] * gradient).sum().double() for name, gradient in terms.items())


WITHOUT = 1  # the step that does not use sometimes.weight


def _gradients(used: dict[str, nn.Parameter], rank: int, size: int, step: int) -> dict[str, torch.Tensor]:
    """Rank `rank`'s gradients of these parameters: whole numbers, times the ranks, so that any mean is exact."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    drawn = {
        name: torch.empty_like(each, requires_grad=False).copy_(
            _numbers_in_half(each, size, generator)
            if each.dtype is torch.float16
            else 2 * size * torch.randint(1, 1000, each.shape, generator=generator)
        )
        for name, each in used.items()
    }
    if "deep.0.0.bias" in drawn:
        drawn["deep.0.0.bias"].fill_(2.0**127 if rank < 2 else 0)  # the sum of two is more than bfloat16 can hold
    drawn["first.weight"][0, 0] = 2.0**127 if rank < 2 else 0  # the same in float32
    drawn["first.bias"] *= 1 + 2.0**-30  # float32 could not hold it
    drawn["first.bias"][2] = 2.0**1023 if rank < 2 else 0  # the same in float64
    if rank == 0:
        drawn["scale"].zero_()  # not so on the other ranks
        drawn["first.bias"][0] = torch.inf
    if rank == size - 1:
        drawn["first.bias"][1] = torch.nan
    return drawn


def _numbers_in_half(like: torch.Tensor, size: int, generator: torch.Generator) -> torch.Tensor:
    """Their sum over the ranks is above 65,504, the largest number of float16; their mean is exact."""
    most = max(1, 15 // size)
    return 4096 * size * torch.randint(min(most, -(-16 // size**2)), most + 1, like.shape, generator=generator)


class _Observed(ObservedStep):
    """Notices also a message that starts before any gradient is in `.grad`. An empty one needs no message."""

    def __init__(self, parameters: Iterable[nn.Parameter]):
        super().__init__([[each] for each in parameters if each.numel()])
        self.early = False

    def started(self, call: Call) -> None:
        if call.payload:
            super().started(call)
            self.early |= all(parameter.grad is None for (parameter,) in self.buckets)

    def waited(self, call: Call) -> None:
        if call.payload:
            super().waited(call)


class _Made(LightMode):
    """Remembers what operations make, but for single numbers."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: list[weakref.ref[torch.UntypedStorage]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(each, torch.Tensor) and each.numel() > 1:
                self._storages.append(weakref.ref(each.untyped_storage()))
        return result

    def kept(self, beside: Iterable[torch.Tensor | None]) -> str:
        """That some of it is still there, as a complaint. beside: what may be."""
        alive = {storage.data_ptr() for each in self._storages if (storage := each()) is not None}
        alive -= {each.untyped_storage().data_ptr() for each in beside if each is not None}
        many = "gradients, or copies of gradients, are" if len(alive) > 1 else "gradient, or a copy of one, is"
        return f"{len(alive)} {many} still kept after finish(), beside `.grad`" if alive else ""


class _Step:
    """One step of a model, and what became of it: `after` are the gradients.

    everyones: by rank, the gradients that it computes. The step WITHOUT finds zeros in `.grad`, the other finds None.
    """

    def __init__(self, number: int, model: _OddModel, used: dict[str, nn.Parameter], everyones: dict[int, dict]):
        self.number, self.used, self.everyones = number, used, everyones
        self._model, self._observed = model, _Observed(used.values())
        self.done, self.last, self.early = False, False, ""

    def run(self, finish: Callable[[], None], made: _Made, rank: int) -> None:
        for parameter in self.used.values():
            if self.number == WITHOUT:
                parameter.grad.zero_()
            else:
                parameter.grad = None
        self.before = self._of_unused()
        self._model.train(self.number != WITHOUT)
        leaving = LeavingTorch()
        leaving.few = 0
        with made, leaving:
            self._observed.run(functools.partial(self._model, self.everyones[rank]), finish)
        self._model.train()
        self.under_way = self._observed.calls - self._observed.waits
        self.done, self.overlap = True, self._observed.exposed()
        for work in works_under_way():
            work.wait()  # so that every rank goes on to the next step, also those that have waited
        # Where finish() left out only those that have ended at some rank, the next step could hang.
        self.last = bool(self._observed.asked)
        if self._observed.early:
            self.early = "an all-reduce was started before `.grad` was complete: there is another hook for that"
        self.after = {name: _copy(parameter.grad) for name, parameter in self.used.items()}
        self.unused = self._of_unused()
        if self.number:
            for parameter in self.used.values():
                parameter.grad = None  # so that only the answer can still have one
        self.memory = self._kept(made) or leaving.complaint

    def _of_unused(self) -> list[torch.Tensor | None]:
        return [_copy(each.grad) for each in (self._model.sometimes.weight, self._model.never)]

    def _kept(self, made: _Made) -> str:
        # The thread that has sent it may hold one a moment longer.
        for pause in (0.0, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032):
            time.sleep(pause)
            parameters = list(self._model.parameters())
            beside = [*parameters, *(each.grad for each in parameters)]
            if not (kept := self._observed.kept() or made.kept(beside)):
                break
        return kept


def _copy(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return gradient.clone() if isinstance(gradient, torch.Tensor) else gradient


def examine_average_when_ready(trial: Trial) -> None:
    """V and A over two steps; C; overlap: all is started when backward returns, and nobody has waited; M.

    The second step is in eval mode, and does not use all parameters. Then V, C and overlap with other numbers of ranks.
    """
    model, made = _OddModel(trial.device), _Made()
    finish, left = _finish_of(trial, model, made)
    for place, hooks in left.items():
        complaint = f"leaves {hooks} hook{'s' if hooks > 1 else ''} on the {place}" if hooks else ""
        trial.criterion("untouched", complaint, "the answer")
    generator, steps = trial.generator(), {}
    for number in range(2 if trial.on_all_ranks else 1):
        used = model.used(number, generator, trial.on_all_ranks)
        everyones = {rank: _gradients(used, rank, trial.size, number) for rank in range(trial.size)}
        case = f"step {number}{', without sometimes.weight' if number == WITHOUT else ''}"
        steps[case] = _Step(number, model, used, everyones)

    def run(_: Callable, step: _Step) -> None:
        if not any(each.last for each in steps.values()):
            step.run(finish, made, trial.rank)

    called = trial.call_each(
        {case: (step,) for case, step in steps.items()}, using=run, beside=[model], changes=[GRADIENTS]
    )
    for step, _ in zip(steps.values(), called, strict=True):
        if step.done:
            _examine_step(trial, step)
    if trial.on_all_ranks:
        trial.end_if_wrong()
        n = (3, 5, 6, 7)[trial.seed % 4]  # none of them a power of two
        makers = {
            f"parameters of odd shapes, seed {trial.seed}": (n, lambda: parameters_of(torch.float16), 2),
            f"34 parameters, seed {trial.seed}": (2, lambda: [*scalars(32), *one_large()], 1),
        }
        cases = {
            case: Case(n, make, lambda each: [nn.ParameterList(each)], [NONE], steps, one_order=True)
            for case, (n, make, steps) in makers.items()
        }
        examine_in_worlds(trial, cases, lambda case: len(case.parameters()))


def _finish_of(trial: Trial, model: _OddModel, made: _Made) -> tuple[Callable[[], None], dict[str, int]]:
    """What the answer returns, and how many hooks it leaves where none belong."""

    def hooks() -> dict[str, int]:
        modules = [held for module in model.modules() for name, held in vars(module).items() if name.endswith("_hooks")]
        frozen = [each for each in model.parameters() if not each.requires_grad]
        parameters = [held for each in frozen for held in (each._backward_hooks, each._post_accumulate_grad_hooks)]
        places = {"modules": modules, "frozen parameters": parameters}
        return {place: sum(len(held) for held in those if held) for place, those in places.items()}

    def run(answer: Callable, model: _OddModel) -> Callable[[], None]:
        with made:
            return answer(model)

    before = hooks()
    finish = trial.call(model, case="called with a model", changes=[HOOKS], using=run)
    trial.cost(calls={})
    return finish, {place: number - before[place] for place, number in hooks().items()}


def _examine_step(trial: Trial, step: _Step) -> None:
    n = trial.size
    sizes = [parameter.nbytes for parameter in step.used.values()]
    most = max(sum(ring_bytes("all_reduce", size, n, rank) for size in sizes) for rank in range(n))
    own = "Each gradient is sent once, in its own dtype."
    trial.cost(calls={"all_reduce": len(step.used)}, max_wire_bytes=most, note=lambda _: own)
    trial.criterion("value", step.early)
    trial.criterion("overlap", step.overlap)
    if step.under_way:
        number = f"{step.under_way} message{'s were' if step.under_way > 1 else ' was'}"
        trial.criterion("value", f"finish() returned while {number} under way")
        return
    trial.criterion("memory", step.memory)
    for name, gradient in step.after.items():
        mean = sum(each[name] / n for each in step.everyones.values())
        trial.value(gradient, mean, f"the gradient of {name!r}")
    for name, gradient, before in zip(("sometimes.weight", "never"), step.unused, step.before, strict=True):
        if name not in step.used:
            trial.value(gradient, before, f"the gradient of {name!r}, which no rank used in this step,")
    trial.agreement(list(step.after.values()))


AVERAGE_WHEN_READY = Exercise(average_when_ready, examine_average_when_ready, also_named=("OverlappedDDP",))
EXERCISES = (AVERAGE_WHEN_READY,)
