"""Lesson 04, seeding checks: are all replicas equal? Asked with one small message."""

import hashlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.course.exercise import At, Exercise


def same_on_all_ranks(model):
    """Return on every rank whether all ranks' models hold the same bits: True or False.

    All values of parameters and buffers count, of any dtype. Names and shapes are
    equal.
    Cost: one dist.all_gather, of at most 32 bytes from each rank.
    """
    world_size = dist.get_world_size()
    # What can 32 bytes say of a whole model?
    # answer: begin
    digest = hashlib.sha256()
    for tensor in [*model.parameters(), *model.buffers()]:
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    mine = torch.tensor(list(digest.digest()), dtype=torch.uint8, device=tensor.device)
    everyones = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(everyones, mine)
    return all(torch.equal(mine, other) for other in everyones)
    # answer: end


def _replicas(at: At) -> Iterator[tuple[str, tuple]]:
    odd = at.rank == at.n - 1  # the rank whose model differs
    yield "equal models", (_model(),)
    yield "equal models with a NaN", (_model(weight=[float("nan"), 1.0]),)
    yield "the last rank has another weight", (_model(weight=[1.0, 2.0 + odd]),)
    yield "the last rank has two weights in another order", (_model(weight=[2.0, 1.0] if odd else [1.0, 2.0]),)
    yield "the last rank has -2 for -1", (_model(weight=[1.0, -2.0 if odd else -1.0]),)
    yield "the last rank has a weight that differs in its last bit", (_model(weight=[1.0, 1.0 + odd * 2.0**-23]),)
    yield "the last rank has -0.0 for 0.0", (_model(weight=[1.0, -0.0 if odd else 0.0]),)
    yield "the last rank has another buffer", (_model(buffer=3 + odd),)


def _model(weight: tuple | list = (1.0, 2.0), buffer: int = 3) -> nn.Module:
    """A parameter that numpy knows and one that it does not, and a buffer that `state_dict()` leaves out."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.tensor(weight))
    model.bf16 = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    model.register_buffer("steps", torch.tensor(buffer), persistent=False)
    return model


EXERCISES = (Exercise(same_on_all_ranks, _replicas, given="import hashlib"),)
