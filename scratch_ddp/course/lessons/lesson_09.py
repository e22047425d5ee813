"""Lesson 09, how large a message: gradients that travel in buckets, and through a buffer that is allocated once."""

import functools
import tracemalloc

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.guard import GRADIENTS, HOOKS
from scratch_ddp.course.lessons.averaging import ObservedStep, everyones_inputs, examine_means, three_layers
from scratch_ddp.course.trial import Trial

SMALL = 1024  # bytes that `average` may allocate after its first call: far less than a gradient


def average_in_buckets(buckets):
    """Have the gradients of each bucket, a list of parameters, averaged while backward goes on.

    Return a function `finish`: after backward and `finish()`, every gradient is the mean over
    the ranks, in each step anew. All parameters are used, gradients are cleared between steps.
    Gradients may arrive in any order, and in another one on each rank.
    Cost: one all-reduce per bucket. It is started when the gradients of this bucket and of all
    buckets before it are complete, and nobody waits for it before `finish()`.
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
    """V and A in two steps, then in other orders of gradients; C; overlap: no bucket is late, and nobody has waited."""
    model = three_layers(trial)
    *first, third, fourth, fifth, sixth = reversed(list(model.parameters()))
    buckets = [first, [third], [fourth, sixth, fifth]]
    finish = trial.call([list(bucket) for bucket in buckets], case="called with three buckets", changes=[HOOKS])
    if not all(_examine_step(trial, finish, model, buckets, step, f"step {step}") for step in range(2)):
        return
    model = _Branches(trial)
    buckets = [list(branch.parameters()) for branch in model.branches]
    finish = trial.call(
        [list(bucket) for bucket in buckets], case="called with buckets of another model", changes=[HOOKS]
    )
    if _examine_step(trial, finish, model, buckets, 2, "the last bucket is complete first"):
        model.turn = trial.rank
        _examine_step(trial, finish, model, buckets, 3, "another order on each rank")


def _examine_step(trial: Trial, finish, model: nn.Module, buckets: list, step: int, case: str) -> bool:
    """Return whether as many messages as there are buckets were started and waited for, the same on all ranks."""
    observed = ObservedStep(buckets, in_order=True)
    inputs = everyones_inputs(trial, step)
    model.zero_grad()
    run = functools.partial(_observe, observed=observed, model=model, inputs=inputs[trial.rank])
    trial.call(finish, case=case, using=run, beside=[model], changes=[GRADIENTS])
    trial.cost(calls={"all_reduce": len(buckets)})
    trial.criterion("overlap", observed.exposed())
    if under_way := observed.calls - observed.waits:
        trial.criterion("value", f"finish() returned while {under_way} messages were under way")
    elif observed.calls < len(buckets):
        trial.criterion("value", f"finish() returned when {observed.calls} of {len(buckets)} messages had been started")
    else:
        examine_means(trial, model, [inputs])
    return observed.waits >= len(buckets)


def _observe(_, finish, observed: ObservedStep, model: nn.Module, inputs: torch.Tensor) -> None:
    observed.run(lambda: model(inputs).sum(), finish)


class _Branches(nn.Module):
    """Three branches, computed in an order that `turn` sets; backward reaches them in the reverse of it.

    All gradients have one size: if messages of different sizes met, gloo would end the process.
    """

    def __init__(self, trial: Trial):
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(*(nn.Linear(48, 48, bias=False) for _ in range(2))) for _ in "abc")
        self.turn = 0
        generator = torch.Generator().manual_seed(9)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, generator=generator)
        self.double().to(trial.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(self.branches[(self.turn + place) % 3](x) for place in range(3))


AVERAGE_IN_BUCKETS = Exercise(average_in_buckets, examine_average_in_buckets)


def average_through_buffer(parameters):
    """Keep room for the gradients of all parameters, one after another in one tensor.

    Return a function `average`, to be called after backward: it leaves the means over the
    ranks in `.grad`, as views of that tensor. It must not matter how gradients were cleared,
    or whether they were. All parameters are used, and have one dtype.
    Cost: one all-reduce per call. After the first call, `average()` allocates less than 1 KiB
    for tensors, and makes no copy of the gradients elsewhere, as in numpy.
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
    """V and A however gradients were cleared; views at the same place in each step; C; M from the second step on."""
    _allocated_by(trial, None, lambda: None)  # the profiler's first start takes seconds: not in the answer's time
    model = three_layers(trial, times=4)
    half = sum(each.nbytes for each in model.parameters()) // 2
    parameters = list(model.parameters())
    average = trial.call(list(parameters), case="called with six parameters", changes=[GRADIENTS])
    addresses, batches = None, []
    for step, (case, clear, backwards) in enumerate(_CASES):
        if clear is not None:
            model.zero_grad(set_to_none=clear)
            batches = []  # whose gradients are in `.grad`
        fresh = [everyones_inputs(trial, 10 * step + each) for each in range(backwards)]
        for inputs in fresh:
            model(inputs[trial.rank]).sum().backward()
        allocated, elsewhere = trial.call(
            average,
            case=case,
            using=functools.partial(_allocated_by, trial),
            beside=[model],
            changes=[GRADIENTS],
        )
        batches = batches + fresh
        trial.cost(calls={"all_reduce": 1})
        if step:
            complaint = f"average() allocates {allocated:,} bytes, budget {SMALL:,}" if allocated > SMALL else ""
            if elsewhere > half:
                complaint = (
                    f"average() holds {elsewhere:,} bytes outside of torch at once, more than half the gradients"
                )
            trial.criterion("memory", complaint)
        examine_means(trial, model, batches)
        lies_at = [each.grad.data_ptr() for each in parameters if isinstance(each.grad, torch.Tensor)]
        trial.criterion("views", _views_complaint(parameters, lies_at, addresses))
        addresses = lies_at


_CASES = [  # what is said, set_to_none of the zero_grad before it (None: not called), backwards
    ("the first step", True, 1),
    ("after zero_grad()", True, 1),
    ("after zero_grad(set_to_none=False)", False, 1),
    ("after zero_grad() and two backwards", True, 2),
    ("after one more backward, nothing cleared", None, 1),
]


def _allocated_by(trial: Trial, _, average) -> tuple[int, int]:
    """Bytes that torch allocates in average(), and the most that Python and numpy hold of their own."""
    # Imported only here: from then on torch notes every allocation, and warns where an older one is freed.
    from scratch_ddp.instruments.memory import memory_use

    with memory_use(trial.device) as used:
        tracemalloc.start()
        try:
            average()
            elsewhere = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    return used.allocated_bytes, elsewhere


def _views_complaint(parameters: list[nn.Parameter], lies_at: list[int], before: list[int] | None) -> str:
    """Say that the gradients are not parts of one tensor that stays where it is; "" if they are."""
    tensors = {each.grad.untyped_storage().data_ptr() for each in parameters if isinstance(each.grad, torch.Tensor)}
    if len(tensors) > 1:
        return f"the gradients lie in {len(tensors)} tensors, should be views of one"
    return "the gradients lie elsewhere than in the step before" if before not in (None, lies_at) else ""


AVERAGE_THROUGH_BUFFER = Exercise(average_through_buffer, examine_average_through_buffer)
EXERCISES = (AVERAGE_IN_BUCKETS, AVERAGE_THROUGH_BUFFER)
