"""What a `my_ddp.py` is judged by: on ranks its class must do what the reference class does; then under torchrun.

The reference and the class wrap equal models and are trained on equal batches, by the engine of the lessons' exercises.
Budgets are those of `notebooks/capstone.md`, which are above the reference's needs.
"""

import contextlib
import importlib
import math
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.cells.rank.interruptible_group import BACKEND
from scratch_ddp.course.arena import Arena
from scratch_ddp.course.capstone import real_loop
from scratch_ddp.course.capstone.reference_class import MyDDP
from scratch_ddp.course.check import try_cases
from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.run import TimeLimit, in_short
from scratch_ddp.instruments.forked_ranks import RankFailed, run_ranks
from scratch_ddp.instruments.memory.use import memory_use
from scratch_ddp.instruments.traffic import ring_bytes, traffic

MIB, SMALL = 2**20, 1024
RANKS, LIMIT = 3, 20.0  # seconds for a class to do what a criterion asks
AS_THE_ENGINE, FAILURES = {"replicas": "agreement"}, ("runs", "group", "waits", "written")  # its names
PROMISES = {
    "start": "all ranks begin with rank 0's parameters and buffers",
    "value": "the gradients are the mean, in float64, and so the parameters those of one process",
    "replicas": "the replicas are equal, bit for bit, after each step",
    "calls": "one call a MiB of gradients at most, and two more",
    "bytes": "no more than a ring sends for 4 bytes a parameter, and 1 KiB",
    "memory": "no more than one further copy of the gradients",
    "accumulation": "nothing is sent inside no_sync(), and once after it",
    "unused": "parameters that a rank, or no rank, has used",
    "frozen": "frozen parameters have no gradient and are not sent",
    **real_loop.PROMISES,
}


def judge(path: Path) -> dict[str, str]:
    """Return what is wrong by criterion; "" where it holds."""
    importlib.import_module("torch._dynamo.utils")  # which the profiler needs: here once, instead of on each rank
    try:
        found = run_ranks(RANKS, judged, path.resolve(), backend=BACKEND, timeout=300)[0]
    except RankFailed as failed:  # a rank has died
        words = (f"rank {rank} {report.splitlines()[-1]}" for rank, report in sorted(failed.failures.items()))
        return dict.fromkeys(PROMISES, "; ".join(words))
    return found if found.keys() == PROMISES.keys() else found | real_loop.judge(path.resolve())


def judged(path: Path, seconds: float = LIMIT, names: Iterable[tuple[str, ...]] | None = None) -> dict[str, str]:
    """On a rank: what is wrong, by the exercises of these names. The class may take so many `seconds` for each.

    If the file holds no class to judge, all criteria say so.
    """
    try:
        module = real_loop.load(path)
    except BaseException as error:
        return dict.fromkeys(PROMISES, f"{path.name} can't be imported: {in_short(error)}")
    if not hasattr(module, "MyDDP"):
        return dict.fromkeys(PROMISES, f"{path.name} defines no class MyDDP yet")
    found = {}
    # As if it were a line of the learner's file, so that complaints name lines of it.
    wrap = eval(compile("lambda model: MyDDP(model)", str(path), "eval"), vars(module))
    for each in names or EXERCISES:
        arena = Arena()
        with arena, TimeLimit(arena, seconds) as limit:
            complaints = try_cases(EXERCISES[each], wrap, arena, limit, arena.everyone)
        failed = next((words for name, words in complaints.items() if name in FAILURES and words), "")
        found |= {name: failed or complaints.get(AS_THE_ENGINE.get(name, name), "") for name in each}
    return found


def tied():
    """Two layers with one weight, a norm between them, and a buffer."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 6))
    model[3].weight = model[0].weight
    model.register_buffer("scale", torch.rand(6))
    return model


class Heads(nn.Module):
    """Three heads on one layer. A batch uses one of them; the third is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(6, 6), nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](torch.tanh(self.body(x)))


def tower(frozen=0):
    """40 layers, 3.9 MiB of parameters: many small ones."""
    model = nn.Sequential(*(nn.Linear(160, 160) for _ in range(40)))
    model[:frozen].requires_grad_(False)
    return model


def start(wrap, model):
    """What the model holds once it is wrapped."""
    wrap(model)
    yield "start", "after MyDDP(model)", model


def train(wrap, model, steps):
    """The model after each backward of some steps of SGD."""
    model = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, rows in enumerate(steps, start=1):
        _backward(model, rows)
        yield "value", f"step {step}", model.module
        optimizer.step()
        model.zero_grad()


def costs(wrap, alone, model, steps):
    """Calls and bytes of a step, and how much more is held at the peak than with the plain model.

    If that is less than the budget, the budget.
    """
    with memory_use() as plain:
        _second_step(alone, steps)
    with memory_use() as used:
        counted = _second_step(wrap(model), steps)
    size = _size(alone)
    made, budget = sum(counted.calls.values()), math.ceil(size / MIB) + 2
    yield "calls", f"the number of calls for {size / MIB:.1f} MiB of gradients", max(made, budget)
    yield "bytes", f"the number of bytes sent for {size:,} bytes of gradients", _bytes(counted, size)
    copies = (used.peak_bytes - plain.peak_bytes) / size
    yield "memory", "the peak, in further copies of the gradients,", max(round(copies, 1), 1.0)


def accumulation(wrap, model, micro_batches):
    """Calls inside `no_sync()`, nested too, and the gradients afterwards; again after an exception."""
    model = wrap(model)
    for where in ("", " after an exception inside no_sync()"):
        for micro, rows in enumerate(micro_batches[:-1]):
            with model.no_sync(), traffic() as counted:
                with model.no_sync() if micro == 0 else contextlib.nullcontext():
                    pass
                _backward(model, rows)
            again = " after an inner no_sync() has ended" if micro == 0 else ""
            yield "accumulation", f"the number of calls inside no_sync(){again}{where}", sum(counted.calls.values())
        _backward(model, micro_batches[-1])
        yield "accumulation", f"two micro-batches inside no_sync() and one outside{where}", model.module
        model.zero_grad()
        with contextlib.suppress(KeyError), model.no_sync():
            raise KeyError


def unused(wrap, model, rows, heads):
    """Gradients where a rank, or no rank, has used a parameter."""
    model = wrap(model)
    for step, head in enumerate(heads, start=1):
        _backward(model, rows, head)
        yield "unused", f"step {step}", model.module
        model.zero_grad()


def frozen(wrap, model, steps):
    """Which parameters have a gradient, and the bytes sent."""
    model, size = wrap(model), _size(model)
    counted = _second_step(model, steps)
    for name, each in model.module.named_parameters():
        yield "frozen", f"{name} has a gradient: that", each.grad is not None
    yield "frozen", f"the number of bytes sent for {size:,} bytes of gradients", _bytes(counted, size)


def _backward(model, *inputs):
    output = model(*inputs)
    ((output - 1).square().mean() + output.sin().mean()).backward()
    getattr(model, "sync_gradients", lambda: None)()  # a plain model has none


def _second_step(model, steps):
    """What this rank sends in a second step, which leaves its gradients."""
    for rows in steps:
        model.zero_grad()
        with traffic() as counted:
            _backward(model, rows)
    return counted


def _size(model):
    """Bytes of all gradients."""
    return sum(each.nbytes for each in model.parameters() if each.requires_grad)


def _bytes(counted, size):
    """Bytes sent, or the budget if they are fewer."""
    return max(counted.wire_bytes, ring_bytes("all_reduce", size + SMALL, dist.get_world_size(), dist.get_rank()))


def _batches(at, count, width=6):
    """This rank's rows for so many steps: in float32 for the wide model, else in float64."""
    rows = torch.randn(at.n, count, 4, width)[at.rank]
    return [*(rows.double() if width == 6 else rows)]


def _exercise(use, case, make):
    """A use of models and batches, which `make` makes with the same random numbers on every rank."""

    def inputs(at):
        yield case, make(at)

    return Exercise(MyDDP, inputs, use, close=1e-9, cost=False)


def _one_ranks(at):
    torch.manual_seed(at.rank)
    return (tied(),)


EXERCISES = {
    ("start",): _exercise(start, "each rank has a model of its own", _one_ranks),
    ("value", "replicas"): _exercise(train, "SGD", lambda at: (tied().double(), _batches(at, 5))),
    ("calls", "bytes", "memory"): _exercise(costs, "many layers", lambda at: (tower(), tower(), _batches(at, 2, 160))),
    ("accumulation",): _exercise(accumulation, "micro-batches", lambda at: (tied().double(), _batches(at, 3))),
    ("unused",): _exercise(unused, "heads", lambda at: (Heads().double(), *_batches(at, 1), [at.rank % 2, 0])),
    ("frozen",): _exercise(frozen, "half are frozen", lambda at: (tower(20), _batches(at, 1, 160))),
}
