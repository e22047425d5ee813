"""A model that no rank ever holds: built on the meta device, and given its values one module at a time."""

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.fsdp import FSDP
from tests.ddp.cases import gathered
from tests.fsdp.cases import message_of
from tests.ranks import run_ranks


def layers() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7)), nn.BatchNorm1d(7), nn.Bilinear(7, 7, 5), nn.Embedding(5, 3)
    )


def on_meta(build, *args, **kwargs) -> nn.Module:
    with torch.device("meta"):
        return build(*args, **kwargs)


def initialised() -> None:
    """The model's own initialisation, the same values on every rank, whatever their seeds; and a step."""
    torch.manual_seed(dist.get_rank())
    sharded = FSDP(on_meta(layers))
    whole = sharded.gather_full_params()
    assert whole["0.0.weight"].abs().max() <= 6**-0.5 and whole["0.0.weight"].std() > 0.1
    assert (whole["0.1.weight"] == 1).all() and (sharded.module[1].running_var == 1).all()
    for tensor in whole.values():
        assert torch.equal(*gathered(tensor))


def test_rows_of_the_first_ranks_own_initialisation():
    run_ranks(2, initialised)


def refused() -> list[str]:
    none = message_of(lambda: FSDP(on_meta(nn.TransformerEncoderLayer, 4, 2)))
    unset = message_of(lambda: FSDP(on_meta(layers), init=lambda module: None))
    return [none, unset]


def test_what_can_not_be_initialised():
    for none, unset in run_ranks(2, refused):
        assert "MultiheadAttention failed: ValueError: it has no reset_parameters(): pass init" in none
        assert "'weight' of a " in unset and "got no values, or NaN, from init" in unset


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


def test_the_first_ranks_values_for_ranks_that_have_none():
    run_ranks(3, one_rank_has_the_values)
