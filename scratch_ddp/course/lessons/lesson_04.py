"""Lesson 04, seeding checks: are all replicas equal? Asked with one small message."""

import hashlib

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.trial import Trial
from scratch_ddp.instruments.traffic import ring_bytes

DIGEST = 32  # bytes of a SHA-256


def same_on_all_ranks(model):
    """Return on every rank whether all ranks' models hold the same bits: True or False.

    Parameters and buffers count, of any dtype, also buffers that `state_dict()` leaves out. The
    model stays as it is. Whatever the models are, every rank takes part.
    Cost: one dist.all_gather, of 8 to 32 bytes from each rank: with fewer, different models are
    too often taken for equal ones.
    """
    # What can 32 bytes say of a whole model?
    # answer: begin
    digest = hashlib.sha256()
    for tensor in [*model.parameters(), *model.buffers()]:
        digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy())
    mine = torch.tensor(list(digest.digest()), dtype=torch.uint8, device=tensor.device)
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    return all(torch.equal(mine, other) for other in everyones)
    # answer: end


class _Model(nn.Module):
    """Parameters of two dtypes, one of them transposed in memory, and a buffer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 7.0).view(2, 3).t())
        self.scale = nn.Parameter(torch.tensor([0.5, 0.25], dtype=torch.bfloat16))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("passing", torch.ones(2, dtype=torch.float64), persistent=False)


def _swap(model: _Model) -> None:
    model.weight.copy_(model.weight.flip(0))


def _nudge(model: _Model) -> None:
    model.weight[2, 1] = torch.nextafter(model.weight[2, 1], torch.tensor(torch.inf, device=model.weight.device))


def _put(name: str, value: float):
    def change(model: _Model) -> None:
        getattr(model, name)[0] = value

    return change


def _share_memory(model: _Model) -> None:
    """The same numbers, as a part of a tensor whose other elements are each rank's own."""
    large = torch.full((4,), float(dist.get_rank()), dtype=model.scale.dtype, device=model.scale.device)
    large[:2] = model.scale
    model.scale.data = large[:2]


def _without_buffers(model: _Model) -> None:
    model.weight[0] += 1


def examine_same_on_all_ranks(trial: Trial) -> None:
    """V and A: equal models, the same NaN, the last bit, a swap, -0.0, half precision, a buffer. C: one all-gather."""
    last, second, everyone = [trial.size - 1], [1 % trial.size], range(trial.size)
    for case, who, change, expected in (
        ("equal models", [], _swap, True),
        ("the same NaN everywhere", everyone, _put("weight", torch.nan), True),
        ("the last rank differs in the last bit of one number", last, _nudge, False),
        ("rank 1 has the same numbers in another order", second, _swap, False),
        ("a buffer is -0.0 on rank 1, 0.0 elsewhere", second, _put("mean", -0.0), False),
        ("rank 1 differs in a bfloat16 parameter", second, _put("scale", 0.75), False),
        ("rank 0 differs in a buffer", [0], _put("mean", 1.0), False),
        ("rank 0 differs in a buffer that is not in state_dict()", [0], _put("passing", 2.0), False),
        ("rank 0 differs in the 40th binary digit of a float64", [0], _put("passing", 1 + 2.0**-40), False),
        ("memory beside a parameter differs, no number does", everyone, _share_memory, True),
        ("no buffers, rank 1 differs", second, _without_buffers, False),
    ):
        model = _Model().to(trial.device)
        if change is _without_buffers:
            del model.mean, model.passing
        if trial.rank in who:
            with torch.no_grad():
                change(model)
        result = trial.call(model, case=case)
        trial.value(result, expected or trial.size == 1)
        trial.agreement(result)
        sent = sum(call.payload for call in trial.calls)
        trial.criterion("digest", f"has {sent} bytes, should have 8 to 32" if sent < 8 else "", "what a rank sends")
        trial.cost(
            calls={"all_gather": 1},
            exactly=True,
            max_wire_bytes=ring_bytes("all_gather", DIGEST, trial.size, trial.rank),
        )


SAME_ON_ALL_RANKS = Exercise(
    same_on_all_ranks,
    examine_same_on_all_ranks,
    given="import hashlib",
)
EXERCISES = (SAME_ON_ALL_RANKS,)
