"""Ranks that do not do the same, and steps left out: an error on every rank, never a hang; the next step is right."""

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.fsdp import FSDP
from tests.ddp.cases import CASES, assert_equal, build, one_process_step
from tests.fsdp.cases import Chain
from tests.ranks import in_turn, message_of

MLP, X = CASES["mlp"], torch.ones(2, 6, dtype=torch.float64)


def step(model: FSDP) -> None:
    MLP.loss(model, X, X).backward()


def forward(model: FSDP) -> None:
    model(X)


def evaluate(model: FSDP) -> None:
    with torch.no_grad():
        model(X)


def under_no_sync(model: FSDP, *todo) -> None:
    with model.no_sync():
        for do in todo:
            do(model)


def optimizer_step(model: FSDP, lr: float = 0.0) -> None:
    torch.optim.SGD(nn.Linear(2, 2).parameters()).step()  # of another model
    torch.optim.SGD(model.parameters(), lr).step()


def stale_loss(model: FSDP) -> None:
    """A backward pass through a forward pass from before a step."""
    loss = model(X).sum()
    optimizer_step(model)
    loss.backward()


def cleared(model: FSDP) -> None:
    under_no_sync(model, step)
    model.zero_grad() if dist.get_rank() else None
    model.sync_gradients()


def again_on_one_rank(_: FSDP) -> None:
    sharded = FSDP(Chain(*([0, 1, 2] if dist.get_rank() == 0 else [0, 0, 1, 2])).double())
    step(sharded)


IN_FORWARD, IN_BACKWARD = "begins a forward pass", "begins a backward pass, or calls sync_gradients()"
NOT_SYNCHRONISED = "ranks 0, 1: the optimizer steps with gradients that were not synchronised"
ON_ITS_WAY = "gradients are on their way between backward and sync_gradients(): use them after it"
OUT_OF_STEP = [  # what is said, and what the ranks do
    (f"rank 1: entry 0 is {IN_BACKWARD}, but {IN_FORWARD} on rank 0", forward, FSDP.sync_gradients),
    (f"rank 1: entry 0 is {IN_FORWARD} under no_grad, but {IN_FORWARD} on rank 0", forward, evaluate),
    (f"is calls gather_full_params(), but {IN_FORWARD} on rank 0", forward, FSDP.gather_full_params),
    (f"is calls clip_grad_norm_(), but {IN_FORWARD} on rank 0", forward, lambda model: model.clip_grad_norm_(1.0)),
    ("rank 0: a unit is called by itself", lambda model: model.module[0](X), forward),
    (f"but {IN_BACKWARD}", lambda m: under_no_sync(m, step), lambda m: under_no_sync(m, forward, forward)),
    ("are synchronised, but gradients are not synchronised", lambda model: under_no_sync(model, step), step),
    ("is calls 'blocks.0' again in the same forward pass, but begins a backward pass", again_on_one_rank),
    (NOT_SYNCHRONISED, lambda model: (step(model), optimizer_step(model))),
    (NOT_SYNCHRONISED, lambda model: (under_no_sync(model, step), optimizer_step(model))),
    (ON_ITS_WAY, lambda model: (step(model), next(model.parameters()).grad.norm())),
    (ON_ITS_WAY, lambda model: (step(model), nn.utils.clip_grad_norm_(model.parameters(), 1.0))),
    ("a load, or a step of the optimizer: run the forward pass again", stale_loss),
    ("gradients cleared since backward: 0.weight", cleared),
    ("is frozen: nothing, but frozen: 2.weight", lambda m: (m.module[2].requires_grad_(False), step(m)), step),
    ("steps of the optimizer: 1 (where ranks differ, one was inter", lambda m: (optimizer_step(m), step(m)), step),
]
STAY_DIFFERENT = OUT_OF_STEP[-2:]


def out_of_step(expected: str, *ways) -> None:
    alone, sharded = build(MLP), FSDP(build(MLP))
    step(sharded), sharded.sync_gradients()
    said = message_of(lambda: ways[dist.get_rank() % len(ways)](sharded))
    assert expected in said, said
    if (expected, *ways) not in STAY_DIFFERENT:
        sharded.zero_grad()
        step(sharded), sharded.sync_gradients()
        one_process_step(MLP, alone, X, X, 1)
        assert_equal(sharded, alone)


def test_ranks_out_of_step_are_told_so():
    in_turn(2, out_of_step, OUT_OF_STEP)
