"""Lesson 09, how large a message: gradients that travel in buckets, and through a buffer that is allocated once."""

import contextlib
import functools
import itertools
import sys
import warnings
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.guard import GRADIENTS, HOOKS
from scratch_ddp.course.inputs.averaging import (
    ObservedStep,
    everyones_inputs,
    examine_means,
    three_layers,
)
from scratch_ddp.course.inputs.lasting import lasting
from scratch_ddp.course.inputs.odd_gradients import (
    FIRST_DTYPES,
    NONE,
    OTHER_DTYPES,
    OWN_ZEROS,
    VIEW_OF_ZEROS,
    ZEROS,
    Case,
    examine_in_worlds,
    one_large,
    parameters_of,
    scalars,
)
from scratch_ddp.course.outside import LeavingTorch
from scratch_ddp.course.trial import Trial
from scratch_ddp.instruments.memory import MemoryLedger

SMALL = 1024  # bytes that `average` may allocate after its first call: far less than a gradient


def average_in_buckets(buckets):
    """Have the gradients of each bucket averaged while backward goes on.

    A bucket is a list of parameters of one dtype, any shapes and strides. Return a function
    `finish`: after backward and `finish()`, every gradient is the mean over the ranks, in each
    step anew, also where the sum would overflow. All parameters are used; gradients are cleared
    between steps, to None or to zeros. They may arrive in any order, also within a bucket, and
    each rank may have an order of its own. Several sets of buckets may be in use at once. Cost:
    one all-reduce per bucket. It is started when the gradients of this bucket and of all buckets
    before it are complete. Only `finish()` waits for it, and then lets go of its handle.
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
    given = [list(bucket) for bucket in buckets]
    finish = trial.call(given, case="called with three buckets", changes=[HOOKS])
    trial.cost(calls={})
    ledger = MemoryLedger(SimpleNamespace(model=list(model.parameters())), torch.uint8)
    ledger.unremarkable = sys.maxsize
    before = _examine_step(trial, finish, model, buckets, given, 0, "step 0", ledger)
    trial.criterion("memory", lasting(before.kept))
    held = _bytes_of(ledger)
    if not trial.on_all_ranks:  # the rest does not depend on the number of ranks
        return
    _examine_step(trial, finish, model, buckets, given, 1, "step 1, after zero_grad(set_to_none=False)", ledger)
    more = lasting(lambda: max(0, _bytes_of(ledger) - held))
    trial.criterion("memory", f"{more:,} bytes more are held than after step 0: let go of them" if more else "")
    model = _Branches(trial)
    buckets = [list(branch.parameters()) for branch in model.branches]
    given = [list(bucket) for bucket in buckets]
    finish = trial.call(given, case="called with buckets of another model", changes=[HOOKS])
    _examine_step(trial, finish, model, buckets, given, 2, "the last bucket is complete first")
    model.turn = trial.rank
    _examine_step(trial, finish, model, buckets, given, 3, "another order on each rank")
    trial.end_if_wrong()
    _examine_in_worlds(trial)


def _examine_in_worlds(trial: Trial) -> None:
    small, large = _two_sizes(trial)
    cases = {
        f"odd buckets in two sets, seed {trial.seed}": Case(
            small, functools.partial(parameters_of, *FIRST_DTYPES), _two_sets, [NONE, ZEROS]
        ),
        f"odd buckets of other dtypes, seed {trial.seed}": Case(
            large, functools.partial(parameters_of, *OTHER_DTYPES), _two_sets, [ZEROS, NONE], 2
        ),
        "a bucket of 260 parameters, and one of an equal one": Case(
            1, functools.partial(scalars, 261), lambda each: [[each[:260], each[260:]]], [NONE], 1
        ),
        "a bucket with a large parameter": Case(2, one_large, lambda each: [[each]], [NONE], 1),
        "no bucket, then one of a single parameter": Case(2, functools.partial(scalars, 1), _none_and_one, [ZEROS], 4),
    }
    examine_in_worlds(trial, cases, lambda case: sum(map(len, case.given(case.parameters()))))


def _two_sizes(trial: Trial) -> tuple[int, int]:
    """Two numbers of ranks."""
    generator = trial.generator()
    return tuple(int(torch.randint(*ends, (), generator=generator)) for ends in ((2, 5), (5, 7)))


def _two_sets(parameters: list[nn.Parameter]) -> list[list[list[nn.Parameter]]]:
    """Of each dtype buckets of five, one and two parameters, the last dtype's in a set of its own."""
    lists = _one_list_each(parameters)
    first, *others = [[[*same[:2], *same[5:]], [same[3]], [same[4], same[2]]] for same in lists]
    return [first, sum(others, [])]


def _none_and_one(parameters: list[nn.Parameter]) -> list[list[list[nn.Parameter]]]:
    return [[], [parameters]]


def _examine_step(
    trial: Trial,
    finish: Callable,
    model: nn.Module,
    buckets: list,
    given: list,
    step: int,
    case: str,
    ledger: MemoryLedger | None = None,
) -> ObservedStep:
    """Return what was observed. Ends the examination where not as many messages as there are buckets were started."""
    observed = ObservedStep(buckets, in_order=True)
    inputs = everyones_inputs(trial, step)
    model.zero_grad(set_to_none=step != 1)
    run = functools.partial(_observe, observed=observed, ledger=ledger, model=model, inputs=inputs[trial.rank])
    known = {"model": model, "buckets": given}
    trial.call(finish, case=case, using=run, beside=known, changes=[GRADIENTS])
    trial.cost(calls={"all_reduce": len(buckets)})
    trial.criterion("overlap", observed.exposed())
    if under_way := observed.calls - observed.waits:
        trial.criterion("value", f"finish() returned while {under_way} messages were under way")
    elif observed.calls < len(buckets):
        trial.criterion("value", f"finish() returned when {observed.calls} of {len(buckets)} messages had been started")
    else:
        examine_means(trial, model, [inputs])
    trial.end_if_fewer(len(buckets), "all_reduce")
    return observed


def _bytes_of(ledger: MemoryLedger) -> int:
    return sum(storage.nbytes() for storage in ledger.storages())


def _observe(
    _, finish: Callable, observed: ObservedStep, ledger: MemoryLedger | None, model: nn.Module, inputs: torch.Tensor
) -> None:
    with ledger("step") if ledger else contextlib.nullcontext():
        observed.run(lambda: model(inputs).sum(), finish)


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

    `parameters` is a list, of one dtype, any shapes and strides; all are used, without gradients
    yet. Return a function `average`, to be called after backward: it leaves the means over the
    ranks in `.grad`, as views of that tensor, also where the sums would overflow. It must not
    matter how gradients were cleared; if they were not, the new means are added to the old.
    Cost: one all-reduce per call. After the first call, `average()` allocates less than 1 KiB
    for tensors, and keeps gradients nowhere else, in torch or outside of it.
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
    _memory_of(trial, [], 0, None, lambda: None)  # the profiler's first start takes seconds: not in the answer's time
    model = three_layers(trial, times=4)
    model[-1].weight.data = model[-1].weight.data.mT.contiguous().mT  # its gradient is not contiguous either
    parameters = list(model.parameters())
    given = list(parameters)
    average = trial.call(given, case="called with six parameters", changes=[GRADIENTS])
    trial.cost(calls={})
    addresses, batches, room, views = None, [], 0, ""
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
            using=functools.partial(_memory_of, trial, parameters, room),
            beside={"model": model, "parameters": given},
            changes=[GRADIENTS],
        )
        batches = batches + fresh
        trial.cost(calls={"all_reduce": 1})
        if dist.distributed_c10d._world.group_count > groups:
            trial.criterion("group", "average() makes a process group in every call")
        trial.criterion("memory", "" if views else complaint)
        examine_means(trial, model, batches)
        lies_at = [each.grad.data_ptr() for each in parameters if isinstance(each.grad, torch.Tensor)]
        views = _views_complaint(parameters, lies_at, addresses)
        trial.criterion("views", views)
        if not step:
            trial.end_if_wrong()  # zero_grad() fails, for instance, where a gradient has a graph
        addresses = lies_at
        room = parameters[0].grad.untyped_storage().data_ptr() if lies_at else 0
    if trial.on_all_ranks:  # what they show does not depend on the number of ranks
        trial.end_if_wrong()
        _through_buffers_in_worlds(trial)


def _through_buffers_in_worlds(trial: Trial) -> None:
    """V and A in six steps, each gradient cleared in a way of its own; with several dtypes, one tensor for each."""
    small, large = _two_sizes(trial)
    ways = [NONE, ZEROS, OWN_ZEROS, VIEW_OF_ZEROS]
    cases = {
        f"gradients cleared in many ways, seed {trial.seed}": Case(
            small, functools.partial(parameters_of, *FIRST_DTYPES), _one_list_each, ways, 6, drawn=True
        ),
        f"other dtypes, gradients cleared in many ways, seed {trial.seed}": Case(
            large, functools.partial(parameters_of, *OTHER_DTYPES), _one_list_each, ways, 2, drawn=True
        ),
        "two lists of the same sizes": Case(2, functools.partial(scalars, 6), _halves, [ZEROS], 3),
        "a large parameter": Case(2, one_large, lambda each: [each], [NONE], 1),
        "one number": Case(1, functools.partial(scalars, 1), lambda each: [each], [NONE, ZEROS], 3),
    }
    examine_in_worlds(trial, cases, lambda case: len(case.given(case.parameters())), stays=True)


def _one_list_each(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    of_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for each in parameters:
        of_dtype.setdefault(each.dtype, []).append(each)
    return list(of_dtype.values())


def _halves(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    return [parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]]


_CASES = [  # what is said, set_to_none of the zero_grad before it (None: not called), backwards
    ("the first step", True, 1),
    ("after zero_grad()", True, 1),
    ("after zero_grad(set_to_none=False)", False, 1),
    ("after zero_grad() and two backwards", True, 2),
    ("after one more backward, nothing cleared", None, 1),
]


def _memory_of(trial: Trial, parameters: list[nn.Parameter], room: int, _, average) -> str:
    """That average() allocates too much, has room for the gradients twice, or takes them elsewhere, as a complaint.

    room: where the tensor begins that the gradients were in after the step before; in the first step 0, and then only
    what is kept for good counts.
    """
    # Imported only here: from then on torch notes every allocation, and warns where an older one is freed.
    from scratch_ddp.instruments.memory import memory_use

    size = sum(each.nbytes for each in parameters)
    theirs = [each for each in [*parameters, *(each.grad for each in parameters)] if isinstance(each, torch.Tensor)]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in theirs}
    storages.pop(room, None)
    given = sum(storages.values())
    ledger = MemoryLedger(SimpleNamespace(given=theirs), torch.uint8)
    ledger.unremarkable = given + size + SMALL
    gradients = [weakref.ref(each.grad.untyped_storage()) for each in parameters if isinstance(each.grad, torch.Tensor)]
    with memory_use(trial.device) as used, ledger("average"), LeavingTorch() as leaving:
        average()
    if room and used.allocated_bytes > SMALL:
        return f"average() allocates {used.allocated_bytes:,} bytes, budget {SMALL:,}"
    if room and (beside := ledger.peak() - given) > size + SMALL:
        return f"average() works with {beside:,} bytes beside the gradients, and one tensor has {size:,}"
    theirs.clear()  # the ledger knows this list, and gloo's work knows the ledger
    now = {each.grad.untyped_storage() for each in parameters if isinstance(each.grad, torch.Tensor)}

    def kept() -> int:
        return sum(gradient is not None and gradient not in now for gradient in (each() for each in gradients))

    if number := lasting(kept):
        return f"average() has put views in their place, and {number} gradients that backward has made are still there"
    return leaving.complaint and f"average() {leaving.complaint}"


def _views_complaint(parameters: list[nn.Parameter], lies_at: list[int], before: list[int] | None) -> str:
    """Say that the gradients are not parts of one tensor that stays where it is; "" if they are."""
    gradients = [each.grad for each in parameters if isinstance(each.grad, torch.Tensor)]
    tensors = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in gradients}
    if any(each.is_inference() for each in gradients):
        return "the gradients are made in inference mode: nobody may change them in place outside of it"
    if len(tensors) > 1:
        return f"the gradients lie in {len(tensors)} tensors, should be views of one"
    size = sum(each.nbytes for each in parameters)
    if sum(tensors.values()) not in (0, size):
        return f"the tensor has {sum(tensors.values()):,} bytes, and the gradients need {size:,}"
    return "the gradients lie elsewhere than in the step before" if before not in (None, lies_at) else ""


AVERAGE_THROUGH_BUFFER = Exercise(average_through_buffer, examine_average_through_buffer)
EXERCISES = (AVERAGE_IN_BUCKETS, AVERAGE_THROUGH_BUFFER)
