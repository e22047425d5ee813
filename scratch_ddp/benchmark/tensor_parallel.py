"""Tensor parallelism beside torch's DTensor: forward and backward of one Llama, in turns."""

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy

from scratch_ddp.benchmark import steps
from scratch_ddp.instruments.timing import Sample, interleaved
from scratch_ddp.tensor_parallel import LLAMA, LLAMA_SEQUENCE, parallelize, vocabulary_parallel_cross_entropy

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")
PAIRS = (
    ("parallelize", "DTensor"),
    ("parallelize", "DTensor with loss_parallel"),
    ("parallelize, sequence", "DTensor, sequence"),
)


def by_dtensor(model: nn.Module, mesh: DeviceMesh, sequence: bool = False, with_loss: bool = False) -> nn.Module:
    """The layout of `parallelize` by torch's `parallelize_module`."""
    stream = Shard(1) if sequence else Replicate()
    logits = {"use_local_output": False} if with_loss else {"output_layouts": Replicate()}
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel(input_layouts=stream, **logits)})
    plan: dict = {"embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)}
    parallelize_module(model.model, mesh, plan | ({"norm": SequenceParallel()} if sequence else {}))
    plan = {name: ColwiseParallel() for name in COLUMNS}
    plan |= {name: RowwiseParallel(output_layouts=stream) for name in ROWS}
    if sequence:
        plan |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), SequenceParallel())
        by_name = {"input_kwarg_layouts": {"hidden_states": stream}}
        plan["self_attn"] = PrepareModuleInput(**by_name, desired_input_kwarg_layouts={"hidden_states": Replicate()})
        plan["mlp"] = PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),))
    for block in model.model.layers:
        parallelize_module(block, mesh, plan)
    return model


def whole_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def step(model: nn.Module, loss: Callable, ids: torch.Tensor) -> float:
    """Forward and backward; the loss."""
    # Positions are given, since the model would read them from the number of tokens that a rank holds.
    logits = model(input_ids=ids, position_ids=torch.arange(ids.shape[1], device=ids.device)[None]).logits
    value = loss(logits, ids.roll(-1, dims=1))
    value.backward()
    model.zero_grad()
    return value.item()


def step_with_parallel_loss(model: nn.Module, ids: torch.Tensor) -> float:
    with loss_parallel():
        return step(model, whole_loss, ids)


def measure(rounds: int, sizes: dict[str, int]) -> dict[str, list[Sample]]:
    """On each rank: forward and backward of every variant, in turns. Raises ValueError where a loss is not right."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    models = [steps.build_llama(**sizes) for _ in range(6)]
    ids = steps.make_batch(0, vocabulary=models[0].lm_head.out_features)["input_ids"]
    ours = partial(step, loss=vocabulary_parallel_cross_entropy, ids=ids)
    torchs = partial(step, loss=whole_loss, ids=ids)
    variants = {
        "parallelize": partial(ours, parallelize(models[0], LLAMA)),
        "parallelize, sequence": partial(ours, parallelize(models[1], LLAMA_SEQUENCE)),
        "DTensor": partial(torchs, by_dtensor(models[2], mesh)),
        "DTensor with loss_parallel": partial(
            step_with_parallel_loss, by_dtensor(models[3], mesh, with_loss=True), ids
        ),
        "DTensor, sequence": partial(torchs, by_dtensor(models[4], mesh, sequence=True)),
    }
    expected = torchs(models[5])
    for name, run in variants.items():
        if not abs((loss := run()) - expected) < 1e-4:
            raise ValueError(f"{name}: the loss is {loss}, not {expected}")
    return interleaved(variants, rounds)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    steps.add_arguments(parser, rounds=20)


def main(options: argparse.Namespace) -> None:
    steps.prepare(options, "Tensor parallelism: forward and backward of a Llama of 16 M parameters")
    steps.show(steps.beside(steps.on_ranks(options.ranks, measure, options.rounds, {}), PAIRS))
