"""Lesson 04, seeding checks: are all replicas equal? Asked with one small message."""

import hashlib

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.course.exercise import Exercise


def same_on_all_ranks(model):
    """Return on every rank whether all ranks' models hold the same bits: True or False.

    All values of parameters and buffers count, of any dtype. Names and shapes are
    equal.
    Cost: one dist.all_gather, of at most 32 bytes from each rank.
    """
    world_size = dist.get_world_size()
    # What can 32 bytes say of a whole model?
    digest = hashlib.sha256()
    for tensor in [*model.parameters(), *model.buffers()]:
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    mine = torch.tensor(list(digest.digest()), dtype=torch.uint8, device=tensor.device)
    everyones = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(everyones, mine)
    return all(torch.equal(mine, other) for other in everyones)


def _replicas(at):
    odd = at.rank == at.n - 1  # the rank whose model differs
    for case, weight, steps in (
        ("equal models", [1.0, 2.0], 3),
        ("the last rank has two weights in another order", [2.0, 1.0] if odd else [1.0, 2.0], 3),
        ("the last rank has -2 for -1", [1.0, -1.0 - odd], 3),
        ("the last rank has a weight that differs in its last bit", [0.1, 1.0 + odd * 2.0**-23], 3),
        ("the last rank has another buffer", [1.0, 2.0], 3 + odd),
    ):
        model = nn.Module()
        model.weight = nn.Parameter(torch.tensor(weight))
        model.bf16 = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        model.register_buffer("steps", torch.tensor(steps), persistent=False)
        yield case, (model,)


EXERCISES = (Exercise(same_on_all_ranks, _replicas, given="import hashlib"),)
