"""Data, pipeline and tensor parallelism and ZeRO together on a mesh, each on one dimension: equal to one process."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from scratch_ddp.benchmark.steps import build_llama
from scratch_ddp.ddp import BucketedDDP, FlatDDP
from scratch_ddp.pipeline import Pipeline
from scratch_ddp.tensor_parallel import LLAMA, gather_full_grads, parallelize, vocabulary_parallel_cross_entropy
from scratch_ddp.zero import ShardedOptimizer
from tests.ranks import assert_refused, run_ranks

VOCABULARY, ROWS, TOKENS, N_MICRO = 32, 8, 5, 2
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4}


def llama() -> LlamaForCausalLM:
    return build_llama(dtype=torch.float64, vocab_size=VOCABULARY, max_position_embeddings=TOKENS, **SIZES)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randint(VOCABULARY, (ROWS, TOKENS), generator=generator) for _ in range(2))
    return x, y


def train_on_mesh(shape: tuple[int, int, int], strategy: type) -> float:
    """Two steps on ranks and in one process; the largest difference of a gradient or a loss."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp", "tp"))
    whole = llama()

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return vocabulary_parallel_cross_entropy(logits, targets, mesh["tp"])

    model = Pipeline(parallelize(llama(), LLAMA, mesh["tp"]), N_MICRO, loss=loss, group=mesh["pp"])
    replica = strategy(model.local_module, group=mesh["dp"])
    sharded = ShardedOptimizer(model.parameters(), torch.optim.SGD, mesh["dp"], lr=0.5)
    optimizers = [sharded, torch.optim.SGD(whole.parameters(), 0.5)]
    worst = 0.0
    for step in range(2):
        x, y = batch(step)
        mine = [each.chunk(shape[0])[mesh["dp"].get_local_rank()] for each in (x, y)]
        with replica.no_sync():  # gradients are complete only after the last micro-batch
            mean = torch.tensor(model.step(*mine, everywhere=True), dtype=torch.float64)
        replica.sync_gradients()
        torch.distributed.all_reduce(mean, group=mesh["dp"].get_group())
        right = F.cross_entropy(whole(x).logits.flatten(0, 1), y.flatten())
        right.backward()
        worst = max(worst, abs(mean.item() / shape[0] - right.item()))
        for name, gradient in gather_full_grads(model.local_module).items():
            worst = max(worst, (gradient - whole.get_parameter(name).grad).abs().max().item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return worst


@pytest.mark.parametrize(
    ("shape", "strategy"), [((2, 2, 1), FlatDDP), ((1, 2, 2), BucketedDDP), ((2, 2, 2), BucketedDDP)]
)
def test_a_mesh_trains_as_one_process_does(shape, strategy):
    n = shape[0] * shape[1] * shape[2]
    assert max(run_ranks(n, train_on_mesh, shape, strategy, timeout=120)) <= 1e-12


def spread(make):
    """Over a mesh of two dimensions."""
    return lambda: make(nn.Sequential(nn.Linear(4, 4)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))


def test_a_mesh_of_which_no_dimension_is_named_is_refused():
    says = "the mesh has 2 dimensions: pass the one to spread over"
    classes = (
        lambda model, mesh: BucketedDDP(model, group=mesh),
        lambda model, mesh: Pipeline(model, 2, loss=F.mse_loss, group=mesh),
        lambda model, mesh: parallelize(model, {"0": lambda module, group: module}, mesh),
    )
    assert_refused(4, [(says, spread(make)) for make in classes])
