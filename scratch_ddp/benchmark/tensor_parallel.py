"""Tensor parallelism against torch's DTensor: CPU and wall seconds of forward and backward, in turns."""

import argparse
from collections.abc import Callable, Mapping, Sequence
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
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

from scratch_ddp.benchmark import steps
from scratch_ddp.benchmark.command import TableRow, cpu_row
from scratch_ddp.instruments.timing import Sample, interleaved
from scratch_ddp.tensor_parallel import (
    LLAMA,
    LLAMA_SEQUENCE,
    VocabularyParallelEmbedding,
    parallelize,
    vocabulary_parallel_cross_entropy,
)

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")
MUST = {  # ours and what it is compared with: (most of its CPU time, aim)
    ("Llama", "Llama, DTensor"): (0.80, 0.65),
    ("Llama", "Llama, DTensor with loss_parallel"): (0.80, 0.65),
    ("Llama, sequence", "Llama, DTensor, sequence"): (0.90, 0.78),
    ("own model", "own model, DTensor"): (0.80, 0.65),
    ("own model, sequence", "own model, DTensor, sequence"): (0.90, 0.78),
}


class Attention(nn.Module):
    """Causal attention without positions."""

    def __init__(self, width: int, head_dim: int):
        super().__init__()
        self.head_dim = head_dim
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (each(x).unflatten(-1, (-1, self.head_dim)) for each in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (each.transpose(1, 2) for each in heads)
        return self.o_proj(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, head_dim: int):
        super().__init__()
        self.input_layernorm, self.self_attn = nn.RMSNorm(width), Attention(width, head_dim)
        self.post_attention_layernorm, self.mlp = nn.RMSNorm(width), Mlp(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class OwnModel(nn.Module):
    """A decoder of 17 M parameters with the names of transformers' Llama."""

    def __init__(self, vocabulary: int = steps.VOCABULARY, width: int = 384, hidden: int = 1024, head_dim: int = 64):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, hidden, head_dim) for _ in range(6))
        self.norm, self.lm_head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(ids)
        for block in self.layers:
            x = block(x)
        return self.lm_head(self.norm(x))


def by_dtensor(model: nn.Module, mesh: DeviceMesh, sequence: bool = False, with_loss: bool = False) -> nn.Module:
    """The same layout by torch's `parallelize_module`."""
    stream = Shard(1) if sequence else Replicate()
    logits = {"use_local_output": False} if with_loss else {"output_layouts": Replicate()}
    inner = getattr(model, "model", model)
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel(input_layouts=stream, **logits)})
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
    parallelize_module(inner, mesh, {"embed_tokens": embedding} | ({"norm": SequenceParallel()} if sequence else {}))
    plan: dict = {name: ColwiseParallel() for name in COLUMNS}
    plan |= {name: RowwiseParallel(output_layouts=stream) for name in ROWS}
    if sequence:
        plan |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), SequenceParallel())
        by_name = {"input_kwarg_layouts": {"hidden_states": stream}}
        by_name["desired_input_kwarg_layouts"] = {"hidden_states": Replicate()}
        by_place = {"input_layouts": (stream,), "desired_input_layouts": (Replicate(),)}
        plan["self_attn"] = PrepareModuleInput(**(by_place if inner is model else by_name))
        plan["mlp"] = PrepareModuleInput(**by_place)
    for block in inner.layers:
        parallelize_module(block, mesh, plan)
    return model


def llama_logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Positions are given, since the model would read them from the number of tokens that a rank holds."""
    return model(input_ids=ids, position_ids=torch.arange(ids.shape[1], device=ids.device)[None]).logits


def own_logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(ids)


def whole_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def step(model: nn.Module, logits: Callable, loss: Callable, ids: torch.Tensor, with_loss: bool = False) -> float:
    """Forward and backward; the loss."""
    targets = ids.roll(-1, dims=1)
    if with_loss:
        with loss_parallel():
            value = loss(logits(model, ids), targets)
            value.backward()
        value = value.full_tensor()
    else:
        value = loss(logits(model, ids), targets)
        value.backward()
    model.zero_grad()
    return value.item()


def build_own(**sizes: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return OwnModel(**sizes)


OWN = {name: entry for name, entry in LLAMA.items() if name}
OWN_SEQUENCE = {name: entry for name, entry in LLAMA_SEQUENCE.items() if name not in ("", "layers.0")}
OWN_SEQUENCE["embed_tokens"] = partial(VocabularyParallelEmbedding, output_move="reduce_scatter")
MODELS = {
    "Llama": (steps.build_llama, llama_logits, LLAMA, LLAMA_SEQUENCE),
    "own model": (build_own, own_logits, OWN, OWN_SEQUENCE),
}


def measure(rounds: int, sizes: Mapping[str, Mapping[str, int]], device_type: str = "cpu") -> dict[str, list[Sample]]:
    """On each rank: seconds of forward and backward of every variant. Collective; those of the slowest rank.

    `sizes`: of each model in MODELS, where they are not the defaults. Raises ValueError where a loss is not right.
    """
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    variants = {}
    for kind in MODELS:
        variants |= make_variants(kind, sizes.get(kind, {}), mesh)
    return interleaved(variants, rounds=rounds, warm_up=2)


def make_variants(kind: str, sizes: Mapping[str, int], mesh: DeviceMesh) -> dict[str, Callable[[], float]]:
    """The steps of one model, sliced in each way."""
    build, logits, plan, sequence_plan = MODELS[kind]
    models = [build(**sizes).to(mesh.device_type) for _ in range(6)]
    ids = steps.make_batch(0, mesh.device_type, models[0].lm_head.out_features)["input_ids"]
    whole = partial(step, logits=logits, loss=whole_loss, ids=ids)
    sliced = partial(step, logits=logits, loss=vocabulary_parallel_cross_entropy, ids=ids)
    variants = {
        kind: partial(sliced, parallelize(models[0], plan)),
        f"{kind}, sequence": partial(sliced, parallelize(models[1], sequence_plan)),
        f"{kind}, DTensor": partial(whole, by_dtensor(models[2], mesh)),
        f"{kind}, DTensor with loss_parallel": partial(
            whole, by_dtensor(models[3], mesh, with_loss=True), with_loss=True
        ),
        f"{kind}, DTensor, sequence": partial(whole, by_dtensor(models[4], mesh, sequence=True)),
    }
    expected = whole(models[5])
    for name, run in variants.items():
        if not abs((loss := run()) - expected) < 1e-4:
            raise ValueError(f"{name}: the loss is {loss}, not {expected}")
    return variants


def rows(samples: Mapping[str, Sequence[Sample]]) -> list[TableRow]:
    """CPU seconds are judged, wall seconds reported."""
    return [
        cpu_row(f"{ours} / {torchs}", samples[ours], samples[torchs], f"≤ {most:.2f} (aim {aim:.2f})", most)
        for (ours, torchs), (most, aim) in MUST.items()
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    steps.add_arguments(parser, rounds=20)


def main(options: argparse.Namespace) -> int:
    return steps.run(
        options, "Tensor parallelism: forward and backward of two models of 16 and 17 M parameters", _measure
    )


def _measure(options: argparse.Namespace, device_type: str) -> tuple[list[TableRow], str]:
    samples = steps.sample_on_ranks(options, measure, {}, device_type)
    return rows(samples), steps.times_table(samples, "Llama, DTensor")
