"""A Llama on a mesh of dp × pp × tp ranks by torch's own means. `rehearsal` runs the same without the ranks."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from scratch_ddp.instruments.cost.layouts import blocks_of_stages

PLAIN = MixedPrecisionPolicy()  # what the model is in
TOKENS, ALL = Shard(1), Replicate()  # dimension 1 of the activations
IN_A_BLOCK = {
    "input_layernorm": SequenceParallel(),
    "self_attn": PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": TOKENS}, desired_input_kwarg_layouts={"hidden_states": ALL}
    ),
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ColwiseParallel()),
    "self_attn.o_proj": RowwiseParallel(output_layouts=TOKENS),
    "post_attention_layernorm": SequenceParallel(),
    "mlp": PrepareModuleInput(input_layouts=TOKENS, desired_input_layouts=ALL),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), ColwiseParallel()),
    "mlp.down_proj": RowwiseParallel(output_layouts=TOKENS),
}
PLAN = {f"model.layers.*.{name}": style for name, style in IN_A_BLOCK.items()}
FIRST = {"model.embed_tokens": RowwiseParallel(input_layouts=ALL, output_layouts=TOKENS)}
LAST = {
    "model.norm": SequenceParallel(),
    "lm_head": ColwiseParallel(input_layouts=TOKENS, output_layouts=Shard(-1), use_local_output=False),
}


class Stage(nn.Module):
    """Some blocks of a Llama under the names that they have in it; the first has the embedding, the last the head.

    `tokens`: of a sequence, of which tensor parallelism may leave a slice here.
    """

    def __init__(self, llama: nn.Module, blocks: range, tokens: int):
        super().__init__()
        self.tokens, whole = tokens, llama.model
        self.first, self.last = blocks.start == 0, blocks.stop == len(whole.layers)
        self.model = nn.Module()
        self.model.layers = nn.ModuleDict({str(number): whole.layers[number] for number in blocks})
        self.model.rotary_emb = whole.rotary_emb
        if self.first:
            self.model.embed_tokens = whole.embed_tokens
        if self.last:
            self.model.norm, self.lm_head = whole.norm, llama.lm_head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.model.embed_tokens(x) if self.first else x
        places = torch.arange(self.tokens, device=x.device)[None]
        others = {"position_ids": places, "position_embeddings": self.model.rotary_emb(x, places)}
        for block in self.model.layers.values():
            x = block(x, **others)
        return self.lm_head(self.model.norm(x)) if self.last else x


def assemble(
    llama: nn.Module, mesh: DeviceMesh, n_micro: int, sequences: int, tokens: int, policy: MixedPrecisionPolicy = PLAIN
) -> tuple[Stage, Schedule1F1B]:
    """Return this rank's stage, and a schedule of `n_micro` micro-batches of `sequences` of `tokens` ids.

    The mesh has the dimensions dp, pp and tp. `policy`: what FSDP computes and sends in.
    """
    place, stages = mesh["pp"].get_local_rank(), mesh["pp"].size()
    counts = blocks_of_stages(len(llama.model.layers), stages)
    start = sum(counts[:place])
    stage = Stage(llama, range(start, start + counts[place]), tokens)

    plan = PLAN | (FIRST if stage.first else {}) | (LAST if stage.last else {})
    parallelize_module(stage, mesh["tp"], plan)

    for module in (*stage.model.layers.values(), stage):
        fully_shard(module, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=False)

    # What a stage takes and gives: between stages a rank of tp sends its slice of the tokens.
    config, tp, dtype = llama.config, mesh["tp"].size(), policy.param_dtype or next(llama.parameters()).dtype
    ids = torch.empty(sequences, tokens, dtype=torch.int64, device="meta")
    like = {"dtype": dtype, "device": "meta", "requires_grad": True}
    hidden = torch.empty(sequences, tokens // tp, config.hidden_size, **like)
    logits = torch.empty(sequences, tokens, config.vocab_size // tp, **like)
    shapes = {"input_args": ids if stage.first else hidden, "output_args": logits if stage.last else hidden}
    group, device = mesh["pp"].get_group(), torch.device(mesh.device_type)
    part = PipelineStage(stage, place, stages, device, group=group, **shapes)
    return stage, Schedule1F1B(part, n_micro, loss_fn=_loss)


def step(stage: Stage, schedule: Schedule1F1B, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
    """Forward and backward of this replica's batch; return its mean loss on the ranks of the last stage."""
    losses = []
    with loss_parallel():
        schedule.step(*([x] if stage.first else []), target=y, losses=losses)
    return torch.stack([each.to_local() for each in losses]).mean().detach() if stage.last else None


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
