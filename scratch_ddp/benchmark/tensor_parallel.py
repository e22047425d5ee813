"""Tensor parallelism beside torch's DTensor: forward and backward of a Llama of 16 M parameters."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import parallel as tp

from scratch_ddp.benchmark import steps
from scratch_ddp.course.pages.torchs_own import ALL, FIRST, PLAN, TOKENS
from scratch_ddp.instruments.timing import Sample, interleaved
from scratch_ddp.tensor_parallel import LLAMA, LLAMA_SEQUENCE, parallelize, vocabulary_parallel_cross_entropy

PAIRS = (
    ("parallelize", "DTensor"),
    ("parallelize", "DTensor with loss_parallel"),
    ("parallelize, sequence", "DTensor, sequence"),
)


def by_dtensor(model: nn.Module, mesh: DeviceMesh, sequence: bool = False, with_loss: bool = False) -> nn.Module:
    """The layout of `parallelize` by torch's `parallelize_module`: lesson 17's; without `sequence`, of whole tokens."""
    logits = {"use_local_output": False} if with_loss else {"output_layouts": ALL}
    if sequence:
        last = {"model.norm": tp.SequenceParallel(), "lm_head": tp.ColwiseParallel(input_layouts=TOKENS, **logits)}
        return tp.parallelize_module(model, mesh, PLAN | FIRST | last)
    linear = (tp.ColwiseParallel, tp.RowwiseParallel)
    plan = {name: type(style)() for name, style in PLAN.items() if isinstance(style, linear)}
    ends = {"model.embed_tokens": tp.RowwiseParallel(input_layouts=ALL), "lm_head": tp.ColwiseParallel(**logits)}
    return tp.parallelize_module(model, mesh, plan | ends)


def step(model: nn.Module, loss: Callable, ids: torch.Tensor) -> float:
    """Forward and backward; the loss."""
    # Positions are given, since the model would read them from the number of tokens that a rank holds.
    logits = model(input_ids=ids, position_ids=torch.arange(ids.shape[1], device=ids.device)[None]).logits
    value = loss(logits, ids.roll(-1, dims=1))
    value.backward()
    model.zero_grad()
    return value.item()


def measure(rounds: int, sizes: dict[str, int] = steps.LLAMA) -> dict[str, list[Sample]]:
    """On each rank: forward and backward of every variant, in turns. Raises ValueError where a loss is not right."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    models = [steps.build_llama(**sizes) for _ in range(6)]
    ids = steps.make_batch(0, vocabulary=models[0].lm_head.out_features)["input_ids"]
    ours = partial(step, loss=vocabulary_parallel_cross_entropy, ids=ids)
    whole = partial(step, loss=steps.token_loss, ids=ids)
    variants = {
        "parallelize": partial(ours, parallelize(models[0], LLAMA)),
        "parallelize, sequence": partial(ours, parallelize(models[1], LLAMA_SEQUENCE)),
        "DTensor": partial(whole, by_dtensor(models[2], mesh)),
        "DTensor with loss_parallel": tp.loss_parallel()(partial(whole, by_dtensor(models[3], mesh, with_loss=True))),
        "DTensor, sequence": partial(whole, by_dtensor(models[4], mesh, sequence=True)),
    }
    expected = whole(models[5])
    for name, run in variants.items():
        if not abs((loss := run()) - expected) < 1e-4:
            raise ValueError(f"{name}: the loss is {loss}, not {expected}")
    return interleaved(variants, rounds)


def rows(rounds: int) -> Iterator[steps.Row]:
    yield from steps.beside(steps.on_ranks(2, measure, rounds), PAIRS)
