"""Data, pipeline and tensor parallelism together on a mesh, each on one dimension of it: equal to one process."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from scratch_ddp.benchmark.steps import build_llama
from scratch_ddp.ddp import BucketedDDP, FlatDDP
from scratch_ddp.pipeline import Pipeline
from scratch_ddp.tensor_parallel import LLAMA, gather_full_grads, parallelize, vocabulary_parallel_cross_entropy
from tests.ranks import run_ranks

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
    optimizers = [torch.optim.SGD(each.parameters(), 0.5) for each in (model, whole)]
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
    ("shape", "strategy"),
    [
        ((2, 2, 1), FlatDDP),
        ((1, 2, 2), BucketedDDP),
        ((2, 2, 2), BucketedDDP),
    ],
)
def test_a_mesh_trains_as_one_process_does(shape, strategy):
    n = shape[0] * shape[1] * shape[2]
    assert max(run_ranks(n, train_on_mesh, shape, strategy, timeout=120)) <= 1e-12


def test_a_mesh_of_which_no_dimension_is_named_is_refused():
    """On every rank, by each of the three, with a sentence that says what to pass."""

    def ranks():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2)))
        for make in (
            lambda: BucketedDDP(model, group=mesh),
            lambda: Pipeline(model, 2, loss=F.mse_loss, group=mesh),
            lambda: parallelize(model, {"0": lambda module, group: module}, mesh),
        ):
            with pytest.raises(ValueError, match=r"the mesh has 2 dimensions: pass the one to spread over"):
                make()

    run_ranks(4, ranks)
