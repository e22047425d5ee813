"""Lesson 09, how large a message: gradients that travel in buckets, and through a buffer that is allocated once."""

import contextlib
import functools
import itertools
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.guard import GRADIENTS, HOOKS
from scratch_ddp.course.inputs.averaging import (
    ObservedStep,
    OddParameters,
    everyones_inputs,
    examine_means,
    three_layers,
    with_nan_and_infinities,
)
from scratch_ddp.course.outside import LeavingTorch
from scratch_ddp.course.trial import Trial
from scratch_ddp.instruments.memory import MemoryLedger

SMALL = 1024  # bytes that `average` may allocate after its first call: far less than a gradient


def average_in_buckets(buckets):
    """Have the gradients of each bucket averaged while backward goes on.

    A bucket is a list of parameters of one dtype and of any shapes. Return a function `finish`:
    after backward and `finish()`, every gradient is the mean over the ranks, in each step anew,
    also where the sum would overflow. All parameters are used; gradients are cleared between steps,
    to None or to zeros. They may arrive in any order, within a bucket too, and in another one on
    each rank. Several sets of buckets may be in use at once. Cost: one all-reduce per bucket. It is
    started when the gradients of this bucket and of all buckets before it are complete; nobody
    waits for it before `finish()`, which then lets go of it.
    """
    missing = [len(bucket) for bucket in buckets]  # how many gradients each of them waits for
    on_the_way = []
    # What does a hook need to know about its parameter? Which bucket may start now?
    # answer: begin
    number_of = {parameter: number for number, bucket in enumerate(buckets) for parameter in bucket}

    def hook(parameter):
        missing[number_of[parameter]] -= 1
        while len(on_the_way) < len(buckets) and missing[len(on_the_way)] == 0:
            bucket = buckets[len(on_the_way)]  # the next in the order that all ranks keep
            flat = torch.cat([each.grad.flatten() for each in bucket])
            flat /= dist.get_world_size()
            on_the_way.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

    for parameter in number_of:
        parameter.register_post_accumulate_grad_hook(hook)

    def finish():
        for bucket, flat, work in on_the_way:
            work.wait()
            parts = flat.split([each.numel() for each in bucket])
            for each, part in zip(bucket, parts, strict=True):
                each.grad.copy_(part.view_as(each))
        on_the_way.clear()
        missing[:] = map(len, buckets)  # for the next step

    # answer: end
    return finish


def examine_average_in_buckets(trial: Trial) -> None:
    """V and A in two steps, in other orders, with two odd sets; C; overlap: no bucket is late, nobody has waited."""
    model = three_layers(trial)
    *first, third, fourth, fifth, sixth = reversed(list(model.parameters()))
    buckets = [first, [third], [fourth, sixth, fifth]]
    finish = _finish_of(trial, buckets, "called with three buckets")
    before = _examine_step(trial, [finish], model, buckets, 0, "step 0")
    if not before:
        return
    if before.kept():
        time.sleep(0.05)  # the thread that sent it may have held one a moment longer
    trial.criterion("memory", before.kept())
    if not _examine_step(trial, [finish], model, buckets, 1, "step 1, after zero_grad(set_to_none=False)"):
        return
    if not trial.on_all_ranks:  # the rest does not depend on the number of ranks
        return
    model = _Branches(trial)
    buckets = [list(branch.parameters()) for branch in model.branches]
    finish = _finish_of(trial, buckets, "called with buckets of another model")
    if not _examine_step(trial, [finish], model, buckets, 2, "the last bucket is complete first"):
        return
    model.turn = trial.rank
    if _examine_step(trial, [finish], model, buckets, 3, "another order on each rank"):
        _examine_odd_sets(trial)


def _examine_odd_sets(trial: Trial) -> None:
    model = OddParameters(trial, torch.float64, torch.float16, torch.float32, torch.bfloat16)
    order = torch.randperm(32, generator=trial.generator()).tolist()
    order.sort(key=lambda number: not model.odd[number].numel())  # what is empty arrives last
    sets = [_odd_buckets(model, [number for number in order if number // 16 == half]) for half in range(2)]
    given = [[list(bucket) for bucket in each] for each in sets]
    finish = trial.call(*given, case="called with two sets of odd buckets", using=_call_with_each, changes=[HOOKS])
    model.order = order
    model.huge = True
    case = f"two sets of odd buckets, seed {trial.seed}, with huge gradients, NaN and infinities"
    _examine_step(trial, finish, model, sum(sets, []), 4, case)


def _odd_buckets(model: OddParameters, numbers: list[int]) -> list[list[nn.Parameter]]:
    """Of each dtype buckets of five, one and two parameters, in the order of `numbers`."""
    of_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for number in numbers:
        of_dtype.setdefault(model.odd[number].dtype, []).append(model.odd[number])
    buckets = []
    for same in of_dtype.values():
        empty, others = ([each for each in same if bool(each.numel()) == filled] for filled in (False, True))
        buckets += [[empty[0], *others[:4]], others[4:5], [empty[1], *others[5:]]]
    return buckets


def _finish_of(trial: Trial, buckets: list, case: str) -> Callable[[], None]:
    return trial.call([list(bucket) for bucket in buckets], case=case, changes=[HOOKS])


def _examine_step(
    trial: Trial, finish: list, model: nn.Module, buckets: list, step: int, case: str
) -> ObservedStep | None:
    """Return what was observed, if as many messages as there are buckets were started and waited for."""
    observed = ObservedStep(buckets, in_order=True)
    inputs = everyones_inputs(trial, step)
    if getattr(model, "huge", False):
        inputs = with_nan_and_infinities(inputs)
    model.zero_grad(set_to_none=step != 1)
    run = functools.partial(_observe, observed=observed, model=model, inputs=inputs[trial.rank])
    trial.call(*finish, case=case, using=run, beside=[model], changes=[GRADIENTS])
    trial.cost(calls={"all_reduce": len(buckets)})
    trial.criterion("overlap", observed.exposed())
    if under_way := observed.calls - observed.waits:
        trial.criterion("value", f"finish() returned while {under_way} messages were under way")
    elif observed.calls < len(buckets):
        trial.criterion("value", f"finish() returned when {observed.calls} of {len(buckets)} messages had been started")
    else:
        examine_means(trial, model, [inputs])
    return observed if observed.waits >= len(buckets) else None


def _observe(_, *finish, observed: ObservedStep, model: nn.Module, inputs: torch.Tensor) -> None:
    observed.run(lambda: model(inputs).sum(), lambda: [each() for each in finish])


class _Branches(nn.Module):
    """Three branches of two layers each, all side by side. `turn` sets in which order they and the layers are computed.

    Backward reaches them in the reverse order. All gradients have one size: if messages of different sizes met, gloo
    would end the process.
    """

    def __init__(self, trial: Trial):
        super().__init__()
        self.branches = nn.ModuleList(nn.ModuleList(nn.Linear(48, 48, bias=False) for _ in range(2)) for _ in "abc")
        self.turn = 0
        generator = torch.Generator().manual_seed(9)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, generator=generator)
        self.double().to(trial.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = 0
        for branch, layer in itertools.product(range(3), range(2)):
            branch, layer = (branch + self.turn) % 3, (layer + self.turn) % 2
            total = total + (2 * branch + layer + 1) * self.branches[branch][layer](x)
        return total


AVERAGE_IN_BUCKETS = Exercise(average_in_buckets, examine_average_in_buckets)


def average_through_buffer(parameters):
    """Keep room for the gradients of all parameters, one after another in one tensor.

    `parameters` is a list, of any shapes and one dtype; all are used. Return a function `average`,
    to be called after backward: it leaves the means over the ranks in `.grad`, as views of that
    tensor, also where the sums would overflow. It must not matter how gradients were cleared, or
    whether they were. Cost: one all-reduce per call. After the first call, `average()` allocates
    less than 1 KiB for tensors, uses no other room for the gradients, and leaves them in torch.
    """
    # Where is a gradient when average() is called, after zero_grad() and without it?
    # answer: begin
    sizes = [parameter.numel() for parameter in parameters]
    buffer = parameters[0].new_zeros(sum(sizes))
    parts = buffer.split(sizes)
    views = [part.view_as(each) for each, part in zip(parameters, parts, strict=True)]

    def average():
        for parameter, view in zip(parameters, views, strict=True):
            torch.div(parameter.grad, dist.get_world_size(), out=view)  # also if it is the view
        dist.all_reduce(buffer)
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = view

    # answer: end
    return average


def examine_average_through_buffer(trial: Trial) -> None:
    """V and A however gradients were cleared; views at the same place in each step; C; M; then with odd parameters."""
    _memory_of(trial, [], None, lambda: None)  # the profiler's first start takes seconds: not in the answer's time
    model = three_layers(trial, times=4)
    model[-1].weight.data = model[-1].weight.data.mT.contiguous().mT  # its gradient is not contiguous either
    parameters = list(model.parameters())
    average = trial.call(list(parameters), case="called with six parameters", changes=[GRADIENTS])
    addresses, batches = None, []
    for step, (case, clear, backwards) in enumerate(_CASES if trial.on_all_ranks else _CASES[:2]):
        if clear is not None:
            model.zero_grad(set_to_none=clear)
            batches = []  # whose gradients are in `.grad`
        fresh = [everyones_inputs(trial, 10 * step + each) for each in range(backwards)]
        for inputs in fresh:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says once that a transposed weight's gradient is not
                model(inputs[trial.rank]).sum().backward()
        groups = dist.distributed_c10d._world.group_count
        complaint = trial.call(
            average,
            case=case,
            using=functools.partial(_memory_of, trial, parameters),
            beside=[model],
            changes=[GRADIENTS],
        )
        batches = batches + fresh
        trial.cost(calls={"all_reduce": 1})
        if dist.distributed_c10d._world.group_count > groups:
            trial.criterion("group", "average() makes a process group in every call")
        trial.criterion("memory", complaint if step else "")
        examine_means(trial, model, batches)
        lies_at = [each.grad.data_ptr() for each in parameters if isinstance(each.grad, torch.Tensor)]
        trial.criterion("views", _views_complaint(parameters, lies_at, addresses))
        addresses = lies_at
    if trial.on_all_ranks:  # what they show does not depend on the number of ranks
        trial.end_if_wrong()
        _examine_odd_parameters(trial)


def _examine_odd_parameters(trial: Trial) -> None:
    """V and A with models of each dtype, two of the same sizes, all averaged before one is looked at; one parameter"""
    dtypes = (torch.float16, torch.float16, torch.float32, torch.float64)
    models: list[nn.Module] = [OddParameters(trial, dtype) for dtype in dtypes]
    for odd in models:
        odd.huge = True
    models.append(nn.Linear(48, 1, bias=False, dtype=torch.float64, device=trial.device))
    lists = [list(each.parameters()) for each in models]
    averages = trial.call(*lists, case="called with odd parameters", using=_call_with_each, changes=[GRADIENTS])
    batches = [with_nan_and_infinities(everyones_inputs(trial, 50 + number)) for number in range(len(models))]
    for model, inputs in zip(models, batches, strict=True):
        model(inputs[trial.rank]).sum().backward()
    case = "five models, with huge gradients, NaN and infinities"
    trial.call(*averages, case=case, using=_call_all, beside=models, changes=[GRADIENTS])
    trial.cost(calls={"all_reduce": len(models)})
    for model, inputs in zip(models, batches, strict=True):
        examine_means(trial, model, [inputs])
        trial.criterion("views", _views_complaint(list(model.parameters()), [], None))


def _call_with_each(answer: Callable, *given: list) -> list:
    return [answer(each) for each in given]


def _call_all(_, *averages: Callable[[], None]) -> None:
    for average in averages:
        average()


_CASES = [  # what is said, set_to_none of the zero_grad before it (None: not called), backwards
    ("the first step", True, 1),
    ("after zero_grad()", True, 1),
    ("after zero_grad(set_to_none=False)", False, 1),
    ("after zero_grad() and two backwards", True, 2),
    ("after one more backward, nothing cleared", None, 1),
]


def _memory_of(trial: Trial, parameters: list[nn.Parameter], _, average) -> str:
    """That average() allocates too much, has room for the gradients twice, or takes them elsewhere, as a complaint."""
    # Imported only here: from then on torch notes every allocation, and warns where an older one is freed.
    from scratch_ddp.instruments.memory import memory_use

    size = sum(each.nbytes for each in parameters)
    ledger = MemoryLedger(SimpleNamespace(given=[parameters, [each.grad for each in parameters]]), torch.uint8)
    with ledger("before"):
        pass
    given = ledger.moments[0].elements()
    ledger.unremarkable = given + size + SMALL
    looks = any(each.grad is None or each.grad._base is None for each in parameters)  # cleared: gradients of their own
    seen = ledger("average") if looks else contextlib.nullcontext()
    with memory_use(trial.device) as used, seen, LeavingTorch() as leaving:
        average()
    if used.allocated_bytes > SMALL:
        return f"average() allocates {used.allocated_bytes:,} bytes, budget {SMALL:,}"
    if (beside := ledger.peak() - given) > size + SMALL:
        return f"average() works with {beside:,} bytes beside the gradients, and one tensor has {size:,}"
    return leaving.complaint and f"average() {leaving.complaint}"


def _views_complaint(parameters: list[nn.Parameter], lies_at: list[int], before: list[int] | None) -> str:
    """Say that the gradients are not parts of one tensor that stays where it is; "" if they are."""
    tensors = {each.grad.untyped_storage().data_ptr() for each in parameters if isinstance(each.grad, torch.Tensor)}
    if len(tensors) > 1:
        return f"the gradients lie in {len(tensors)} tensors, should be views of one"
    return "the gradients lie elsewhere than in the step before" if before not in (None, lies_at) else ""


AVERAGE_THROUGH_BUFFER = Exercise(average_through_buffer, examine_average_through_buffer)
EXERCISES = (AVERAGE_IN_BUCKETS, AVERAGE_THROUGH_BUFFER)
