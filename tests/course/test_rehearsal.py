"""A rehearsal of one rank says what that rank really sends and holds."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import LlamaConfig, LlamaForCausalLM

from scratch_ddp.course.pages import rehearsal, torchs_own
from scratch_ddp.instruments.traffic import traffic
from tests.ranks import run_ranks

MESH, TOKENS, N_MICRO = {"dp": 2, "pp": 2, "tp": 2}, 8, 3
SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24}
LLAMA = {**SIZES, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}


def really_sent() -> tuple[dict[str, list[int]], int]:
    """By the second step: the first one agrees on shapes."""
    mesh = init_device_mesh("cpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    llama = LlamaForCausalLM(LlamaConfig(**LLAMA, use_cache=False))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    stage, schedule = torchs_own.assemble(llama, mesh, N_MICRO, 1, TOKENS, policy)
    ids = torch.zeros(N_MICRO, TOKENS, dtype=torch.int64)
    for _ in range(2):
        with traffic() as counted:
            torchs_own.step(stage, schedule, ids, ids)
    return rehearsal.by_dimension(counted, mesh), sum(each.to_local().nbytes for each in stage.parameters())


def test_a_rehearsal_counts_what_the_rank_sends_and_holds():
    real = run_ranks(8, really_sent, timeout=120)
    for rank in (0, 7):
        found = rehearsal.rehearse(rank, mesh=MESH, llama=LLAMA, tokens=TOKENS, n_micro=N_MICRO)
        assert found["sent"] == real[rank][0] and found["kept"] > 0
        assert found["held"]["master"] == real[rank][1] and found["held"]["gradients"] == 2 * real[rank][1]
