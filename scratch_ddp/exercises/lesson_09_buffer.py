"""Lesson 09, the second exercise: gradients in a buffer that is there for good."""

import functools

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.exercises.averaging import everyones_inputs, examine_means, three_layers
from scratch_ddp.exercises.exercise import Exercise, WrongAnswer
from scratch_ddp.exercises.trial import Trial

SMALL = 1024  # bytes that an answer may allocate: far less than a gradient


def average_through_buffer(parameters):
    """Keep room for the gradients of all parameters, one after another in one tensor.

    Return a function `average`, to be called after backward: it leaves the means over the
    ranks in `.grad`, as views of that tensor. It must not matter how gradients were cleared,
    or whether they were. All parameters are used, and have one dtype.
    Cost: one all-reduce a call. After the first call, `average()` allocates less than 1 KiB.
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
    _allocated_by(trial, None, lambda: None)  # the profiler's first start takes seconds, which are not the answer's
    model = three_layers(trial)
    parameters = list(model.parameters())
    average = trial.call(list(parameters), case="called with six parameters")
    addresses, batches = None, []
    for step, (case, clear, backwards) in enumerate(_CASES):
        if clear is not None:
            model.zero_grad(set_to_none=clear)
            batches = []  # whose gradients are in `.grad`
        fresh = [everyones_inputs(trial, 10 * step + each) for each in range(backwards)]
        for inputs in fresh:
            model(inputs[trial.rank]).sum().backward()
        allocated = trial.call(average, case=case, using=functools.partial(_allocated_by, trial))
        batches = batches + fresh
        trial.cost(calls={"all_reduce": 1})
        if step:
            complaint = f"average() allocates {allocated:,} bytes, budget {SMALL:,}" if allocated > SMALL else ""
            trial.criterion("memory", complaint)
        examine_means(trial, model, batches)
        lies_at = [each.grad.data_ptr() for each in parameters if isinstance(each.grad, torch.Tensor)]
        trial.criterion("views", _why_not_views(parameters, lies_at, addresses))
        addresses = lies_at


_CASES = [  # what is said, set_to_none of the zero_grad before it (None: not called), backwards
    ("the first step", True, 1),
    ("after zero_grad()", True, 1),
    ("after zero_grad(set_to_none=False)", False, 1),
    ("after zero_grad() and two backwards", True, 2),
    ("after one more backward, nothing cleared", None, 1),
]


def _allocated_by(trial: Trial, _, average) -> int:
    # Only here: from its import on torch notes every allocation, and writes a warning where an older one is freed.
    from scratch_ddp.memory import memory_use

    with memory_use(trial.device) as used:
        average()
    return used.allocated_bytes


def _why_not_views(parameters: list[nn.Parameter], lies_at: list[int], before: list[int] | None) -> str:
    """Say why the gradients are not parts of one tensor that stays where it is, or ""."""
    tensors = {each.grad.untyped_storage().data_ptr() for each in parameters if isinstance(each.grad, torch.Tensor)}
    if len(tensors) > 1:
        return f"the gradients lie in {len(tensors)} tensors, should be views of one"
    return "the gradients lie elsewhere than in the step before" if before not in (None, lies_at) else ""


AVERAGE_THROUGH_BUFFER = Exercise(
    average_through_buffer,
    examine_average_through_buffer,
    wrong=(
        WrongAnswer(
            "sums",
            fails="value",
            says="Rank 0, the first step: the gradients at entry 0 is wrong in",
            edits={
                "torch.div(parameter.grad, dist.get_world_size(), out=view)  # also if it is the view": (
                    "view.copy_(parameter.grad)"
                )
            },
        ),
        WrongAnswer(
            "a new flat tensor in each step",
            fails="memory",
            says="Rank 0, after zero_grad(): average() allocates",
            body="""
def average():
    flat = torch.cat([each.grad.flatten() for each in parameters])
    flat /= dist.get_world_size()
    dist.all_reduce(flat)
    for each, part in zip(parameters, flat.split([each.numel() for each in parameters]), strict=True):
        each.grad = part.view_as(each)
""",
            also=("views",),
        ),
        WrongAnswer(
            "the gradients are views from the beginning, and nobody looks again",
            fails="value",
            says="Rank 0, the first step: the gradients at entry 0 is wrong in",
            edits={
                "    def average():\n": (
                    "    for parameter, view in zip(parameters, views, strict=True):\n"
                    "        parameter.grad = view\n\n    def average():\n"
                ),
                "        for parameter, view in zip(parameters, views, strict=True):\n            torch.div("
                "parameter.grad, dist.get_world_size(), out=view)  # also if it is the view\n": (
                    "        buffer.div_(dist.get_world_size())\n"
                ),
                "        dist.all_reduce(buffer)\n        for parameter, view in zip(parameters, views, strict=True):\n"
                "            parameter.grad = view": ("        dist.all_reduce(buffer)"),
            },
            also=("agreement", "views"),
        ),
        WrongAnswer(
            "only what is copied in is divided",
            fails="value",
            says="Rank 0, after zero_grad(set_to_none=False): the gradients at entry 0 is wrong in",
            edits={
                "            torch.div(": (
                    "            if parameter.grad.data_ptr() != view.data_ptr():\n                torch.div("
                )
            },
        ),
        WrongAnswer(
            "adds to what is left of the step before",
            fails="value",
            says="Rank 0, after zero_grad(): the gradients at entry 0 is wrong in",
            edits={
                "torch.div(parameter.grad, dist.get_world_size(), out=view)  # also if it is the view": (
                    "view.add_(parameter.grad, alpha=1 / dist.get_world_size())"
                )
            },
        ),
        WrongAnswer(
            "copies the means back into gradients of their own",
            fails="views",
            says="Rank 0, the first step: the gradients lie in 6 tensors, should be views of one.",
            edits={"            parameter.grad = view": "            parameter.grad.copy_(view)"},
        ),
        WrongAnswer(
            "divides into a new tensor first",
            fails="memory",
            says="Rank 0, after zero_grad(): average() allocates",
            edits={
                "torch.div(parameter.grad, dist.get_world_size(), out=view)  # also if it is the view": (
                    "view.copy_(parameter.grad / dist.get_world_size())"
                )
            },
        ),
        WrongAnswer(
            "a message for each view",
            fails="cost",
            says="calls all_reduce 6 times, budget 1",
            edits={
                "        dist.all_reduce(buffer)": "        for view in views:\n            dist.all_reduce(view)",
            },
        ),
    ),
)
EXERCISES = (AVERAGE_THROUGH_BUFFER,)
