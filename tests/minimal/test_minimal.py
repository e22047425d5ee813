"""The classes to read: they train as one process does, and stay readable."""

import ast
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import scratch_ddp
from scratch_ddp.instruments.traffic import traffic
from scratch_ddp.minimal import ddp, fsdp, zero
from tests.ranks import assert_refused, in_turn, run_ranks

STRATEGIES = ["SimpleDistributedDataParallelism", "FlatDDP", "OverlappedDDP", "BucketedDDP"]
KINDS = [*STRATEGIES, "ZeRO-1", "ZeRO-2", "FSDP"]
PACKAGE = Path(scratch_ddp.__file__).parent


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Language(nn.Module):
    """An embedding, whose input needs no gradient, some blocks, and a head. 3 ranks don't divide the sizes."""

    def __init__(self, width=6):
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 5)

    def forward(self, words):
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build():
    torch.manual_seed(0)
    return Language().double()


def loss_of(model, step, share=slice(None)):
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(0, 11, (12, 4), generator=generator)[share]
    labels = torch.randint(0, 5, (12, 4), generator=generator)[share]
    return nn.functional.cross_entropy(model(words).flatten(0, 1), labels.flatten())


def my_share():
    return slice(dist.get_rank(), None, dist.get_world_size())


def wrapped(kind):
    """The model, what to call after backward, and its optimizer."""
    model = build()
    if kind == "FSDP":
        model = fsdp.FSDP(model, units=model.blocks)
        return model, lambda: None, torch.optim.AdamW(model.parameters(), lr=0.01)
    if kind in STRATEGIES:
        model = getattr(ddp, kind)(model)
        return model, model.sync_gradients, torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = zero.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    if kind == "ZeRO-2":
        return model, lambda: zero.reduce_gradients(optimizer), optimizer
    model = ddp.FlatDDP(model)
    return model, model.sync_gradients, optimizer


def trains(kind, steps=5):
    (model, sync, optimizer), alone = wrapped(kind), build()
    plain = torch.optim.AdamW(alone.parameters(), lr=0.01)
    for step in range(steps):
        for each in (optimizer, plain):
            each.zero_grad()
        loss_of(model, step, my_share()).backward()
        sync()
        loss_of(alone, step).backward()
        for each in (optimizer, plain):
            each.step()
    for unit in model.units if kind == "FSDP" else ():
        unit.gather()
    for mine, right in zip(getattr(model, "module", model).parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), right.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("world_size", [2, 3])
def test_they_train_as_one_process(world_size):
    in_turn(world_size, trains, [(kind,) for kind in KINDS])


def accumulates(kind):
    (model, sync, _), alone = wrapped(kind), build()
    for step in range(2):
        loss_of(alone, step).backward()
    with traffic() as silent, model.no_sync():
        loss_of(model, 0, my_share()).backward()
        sync()
    loss_of(model, 1, my_share()).backward()
    sync()
    assert not silent.calls
    for mine, right in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, right.grad, rtol=1e-9, atol=1e-15)


def test_accumulation_under_no_sync():
    in_turn(2, accumulates, [(kind,) for kind in STRATEGIES])


def replicas_that_differ():
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, 1.0)
    nn.init.constant_(model.bias, float(dist.get_rank() == 2))
    ddp.SimpleDistributedDataParallelism(model)


def test_replicas_that_differ_are_refused_on_every_rank():
    assert_refused(3, [("{2: 'bias'}", replicas_that_differ)])


def step_counted(kind):
    """What travels in a step, and how many elements of optimizer state this rank keeps for each moment."""
    model, sync, optimizer = wrapped(kind)
    with traffic() as step:
        loss_of(model, 0, my_share()).backward()
        sync()
        optimizer.step()
    return step.calls, sum(state["exp_avg"].numel() for state in optimizer.state.values())


def test_what_travels_and_that_state_and_shards_are_shared_out():
    sizes = [each.numel() for each in build().parameters()]
    n, elements = len(sizes), sum(sizes)
    one, other = (dict(zip(KINDS, each, strict=True)) for each in in_turn(2, step_counted, [(kind,) for kind in KINDS]))
    calls = {kind: found for kind, (found, _) in one.items()}
    assert calls["SimpleDistributedDataParallelism"] == calls["OverlappedDDP"] == {"all_reduce": n}
    assert calls["FlatDDP"] == calls["BucketedDDP"] == {"all_reduce": 1}
    assert calls["ZeRO-1"] == {"all_reduce": 1, "broadcast": n}
    assert calls["ZeRO-2"] == {"reduce": n, "broadcast": n}
    assert calls["FSDP"] == {"all_gather": 3 + 1 + 3, "reduce_scatter": 4}  # the root is gathered once
    for kind, uneven in (("ZeRO-1", max(sizes)), ("ZeRO-2", max(sizes)), ("FSDP", 0)):
        assert abs(one[kind][1] - other[kind][1]) <= uneven
        assert elements <= one[kind][1] + other[kind][1] <= elements + (8 if kind == "FSDP" else 0)  # rows to fill up


def test_buckets_start_in_their_order_whichever_is_full_first():
    def started():
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).double()
        buckets = ddp.BucketedDDP(model, bucket_mb=1e-6)
        later, sooner = buckets.buckets[1], buckets.buckets[0]
        for bucket, expected in ((later, 0), (sooner, 2)):
            (parameter,) = bucket.views
            parameter.grad = torch.full_like(parameter, 2.0 * dist.get_rank())
            buckets.gradient_is_ready(bucket, parameter)
            assert len(buckets.under_way) == expected
        buckets.sync_gradients()
        return all(torch.equal(each.grad, torch.ones_like(each)) for each in model.parameters())

    assert run_ranks(2, started) == [True, True]


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def test_one_file_is_all_there_is_to_read_and_the_robust_classes_do_not_import_it():
    for name, most in {"ddp": 200, "zero": 150, "fsdp": 150}.items():
        path = PACKAGE / f"minimal/{name}.py"
        assert len(path.read_text().splitlines()) <= most
        assert {module.split(".")[0] for module in imports_of(path)} <= {"torch", "contextlib", "collections", "typing"}
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name in ("ddp", "zero", "fsdp", "common", "collectives"):
            assert not any("minimal" in module for module in imports_of(path)), path
