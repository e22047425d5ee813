"""What ranks really hold of small models under a layout, for comparison with the formulas of `instruments.cost`."""

import copy
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig

from scratch_ddp.ddp import FlatDDP
from scratch_ddp.fsdp import FSDP
from scratch_ddp.instruments.cost import FP32, Layout, ModelShape, measured_states, rank_memory
from scratch_ddp.instruments.cost.layouts import blocks_of_stages
from scratch_ddp.instruments.cost.models import GPT_2
from scratch_ddp.pipeline import Pipeline
from scratch_ddp.tensor_parallel import LLAMA, parallelize
from scratch_ddp.zero import ShardedOptimizer, reduce_gradients

_SIZES = {"vocab_size": 512, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 8}
CONFIGS: dict[str, PretrainedConfig] = {
    "Llama": LlamaConfig(**_SIZES, num_attention_heads=8, num_key_value_heads=4, use_cache=False),
    "GPT-2": GPT2Config(
        vocab_size=512, n_embd=96, n_layer=8, n_head=6, n_positions=256, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    ),
}  # fmt: skip
TWO_MATRICES = ModelShape("two matrices", 8, 96, 256, mlp_matrices=2, norm_vectors=0, saved_in_mlp=1)
SHAPES = {
    "Llama": ModelShape("Llama", 8, 96, 256, 8, 4, 12, 512),
    "GPT-2": ModelShape("GPT-2", 8, 96, 384, 6, 6, 16, 512, tied=True, positions=256, **GPT_2),
    TWO_MATRICES.name: TWO_MATRICES,
}


def new_model(name: str, blocks: int = 8) -> nn.Module:
    """One of SHAPES in float32, the same on every rank."""
    torch.manual_seed(43)
    if name not in CONFIGS:
        width, inner = TWO_MATRICES.width, TWO_MATRICES.inner
        pairs = [(nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)) for _ in range(blocks)]
        return nn.Sequential(*(nn.Sequential(up, nn.ReLU(), down) for up, down in pairs))
    config = copy.deepcopy(CONFIGS[name])
    config.num_hidden_layers = blocks
    return AutoModelForCausalLM.from_config(config)


def with_checkpointing(model: nn.Module) -> nn.Module:
    """Have every block of a transformers model keep its input alone."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})  # the name before transformers 5.2
    return model.train()


def loss_of(model: nn.Module, name: str, sequences: int = 2, tokens: int = 32) -> torch.Tensor:
    """The sum of a model's output for random tokens, or for ones where there is no embedding."""
    x = _batch(name, sequences, tokens)
    if name not in CONFIGS:
        return model(x.to(next(model.parameters()).dtype)).sum()
    return model(x).logits.sum()


def fullest(name: str, layout: Layout) -> float:
    """Train two steps; return the bytes of states between backward and step, on the rank that holds most.

    Every rank calls it; `layout` splits one way.
    """
    model, optimizer = new_model(name), None
    if layout.tp > 1:
        parallelize(model, LLAMA)
    if layout.pp > 1:  # cut where the formulas cut; a decoder's layer 0 is its embedding
        ends = accumulate(blocks_of_stages(SHAPES[name].blocks, layout.pp)[:-1])
        cuts = [end + (name in CONFIGS) for end in ends]
        pipeline = Pipeline(model, layout.micro_batches, loss=lambda output, _: output.mean(), cuts=cuts)
        model, x = pipeline.local_module, _batch(name, 2 * layout.micro_batches)
    if layout.dp > 1 and layout.stage in ("ZeRO-1", "ZeRO-2"):
        optimizer = ShardedOptimizer(model.parameters(), AdamW)
    if layout.dp > 1 and layout.stage != "ZeRO-2":
        model = FSDP(model) if layout.stage == "ZeRO-3" else FlatDDP(model)
    optimizer = optimizer or AdamW(model.parameters())
    for _ in range(2):
        if layout.pp > 1:
            pipeline.step(x, x)
        else:
            loss_of(model, name).backward()
        if layout.dp > 1:
            reduce_gradients(optimizer) if layout.stage == "ZeRO-2" else model.sync_gradients()
        held = measured_states(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    most = torch.tensor(held.total, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


def by_formula(name: str, layout: Layout) -> float:
    """The same by `rank_memory`, without activations, all in float32."""
    found = rank_memory(SHAPES[name], layout, 32, FP32)
    return found.weights + found.gradients + found.optimizer


def _batch(name: str, sequences: int, tokens: int = 32) -> torch.Tensor:
    if name not in CONFIGS:
        return torch.ones(sequences, tokens, TWO_MATRICES.width)
    return torch.randint(512, (sequences, tokens), generator=torch.Generator().manual_seed(1))
