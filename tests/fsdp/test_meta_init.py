"""A model that no rank ever holds: built on the meta device, and given its values one module at a time."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.benchmark.steps import build_llama, make_batch
from scratch_ddp.fsdp import FSDP
from tests.ddp.cases import batches
from tests.fsdp.cases import message_of
from tests.ranks import run_ranks

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


def layers() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7)), nn.BatchNorm1d(7), nn.Bilinear(7, 7, 5), nn.Embedding(5, 3)
    )


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


def on_meta(build, *args, **kwargs) -> nn.Module:
    with torch.device("meta"):
        return build(*args, **kwargs)


def same_seed(build, order: str) -> None:
    """The values of one process that seeds alike: by building, or by initialising an empty model module by module."""
    torch.manual_seed(7)
    alone = build() if order == "built" else on_meta(build).to_empty(device="cpu")
    if order == "initialised":
        alone.second.weight = alone.first.weight  # to_empty forgets ties
        for module in alone.modules():
            getattr(module, "reset_parameters", lambda: None)()
    torch.manual_seed(7)
    sharded = FSDP(on_meta(build), replicated=[nn.LayerNorm] if build is layers else [])
    whole = sharded.gather_full_params()
    assert list(whole) == [name for name, _ in alone.named_parameters(remove_duplicate=False)]
    for name, parameter in alone.named_parameters():
        assert torch.equal(whole[name], parameter), name
    for name, buffer in alone.named_buffers():
        assert torch.equal(dict(sharded.module.named_buffers())[name], buffer), name
    assert torch.rand(1) == (torch.manual_seed(7), build(), torch.rand(1))[2] or order != "built"


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_values_of_one_process_with_the_same_seed(world_size):
    run_ranks(world_size, same_seed, layers, "built")
    run_ranks(world_size, same_seed, Tied, "initialised")


def llama_from_meta() -> float:
    model = on_meta(build_llama, **SMALL)
    torch.manual_seed(0)

    def init(module: nn.Module) -> None:
        model._init_weights(module)
        if hasattr(module, "inv_freq"):  # a buffer that the constructor computes
            frequencies, _ = module.compute_default_rope_parameters(model.config)
            module.inv_freq.copy_(frequencies)
            if hasattr(module, "original_inv_freq"):
                module.original_inv_freq.copy_(frequencies)

    sharded = FSDP(model, init=init)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.01)
    losses = []
    for _ in range(5):
        loss = sharded(**make_batch(dist.get_rank(), vocabulary=64)).loss
        loss.backward()
        sharded.sync_gradients()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[-1] / losses[0]


def test_a_language_model_from_the_meta_device_learns():
    assert all(ratio < 0.95 for ratio in run_ranks(2, llama_from_meta))


def refused() -> list[str]:
    torch.manual_seed(dist.get_rank())
    seeds = message_of(lambda: FSDP(on_meta(layers)))
    torch.manual_seed(0)
    none = message_of(lambda: FSDP(on_meta(nn.TransformerEncoderLayer, 4, 2)))
    unset = message_of(lambda: FSDP(on_meta(layers), init=lambda module: None))
    raises = message_of(lambda: FSDP(on_meta(layers), init=lambda module: 1 / (1 - dist.get_rank())))
    return [seeds, none, unset, raises]


def test_what_can_not_be_initialised():
    for seeds, none, unset, raises in run_ranks(2, refused):
        assert "random numbers differ: set the same seed" in seeds
        assert "a MultiheadAttention has no reset_parameters(): pass init" in none
        assert "'0.0.weight' on the meta device got no values, or NaN, from the init of Linear" in unset
        assert "rank 1: init failed: ZeroDivisionError: division by zero" in raises


def one_rank_has_the_values() -> None:
    """The first rank has read a checkpoint, the others have built the model on the meta device."""
    torch.manual_seed(3)
    alone = layers()
    sharded = FSDP(alone if dist.get_rank() == 0 else on_meta(layers))
    torch.manual_seed(3)
    expected = layers()
    whole = sharded.gather_full_params()
    assert all(torch.equal(whole[name], parameter) for name, parameter in expected.named_parameters())
    for mine, theirs in zip(sharded.module.buffers(), expected.buffers(), strict=True):
        assert torch.equal(mine, theirs)
    x, _ = batches(1, 1)[0]
    sharded.module[0](x.float()).sum().backward()


def test_the_first_ranks_values_for_ranks_that_have_none():
    run_ranks(3, one_rank_has_the_values)
