"""A model that no rank ever holds: built on the meta device, and given its values one module at a time."""

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.fsdp import FSDP
from tests.ddp.cases import gathered
from tests.fsdp.cases import message_of
from tests.ranks import run_ranks


def layers() -> nn.Module:
    tied = nn.Linear(6, 6), nn.Linear(6, 6)
    tied[1].weight = tied[0].weight
    return nn.Sequential(*tied, nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7)), nn.BatchNorm1d(7), nn.LSTM(7, 5))


def on_meta(build, *args) -> nn.Module:
    with torch.device("meta"):
        return build(*args)


def initialised() -> list[str]:
    """The model's own initialisation, the same values on every rank, whatever their seeds; and what is refused."""
    torch.manual_seed(dist.get_rank())
    sharded = FSDP(on_meta(layers))
    whole = sharded.gather_full_params()
    assert whole["2.0.weight"].abs().max() <= 6**-0.5 and whole["2.0.weight"].std() > 0.1
    assert (whole["2.1.weight"] == 1).all() and (sharded.module[3].running_var == 1).all()
    assert sharded.module[0].weight is sharded.module[1].weight
    assert all(torch.equal(*gathered(tensor)) for tensor in whole.values())
    none = message_of(lambda: FSDP(on_meta(nn.TransformerEncoderLayer, 4, 2)), AttributeError)
    unset = message_of(lambda: FSDP(on_meta(layers), init=lambda module: None))
    return [none, unset]


def test_rows_of_the_first_ranks_own_initialisation():
    for none, unset in run_ranks(2, initialised):
        assert none == "'MultiheadAttention' object has no attribute 'reset_parameters'"
        assert unset.startswith("init of a ") and "without values, or NaN" in unset


def one_rank_has_the_values() -> None:
    """The first rank has read a checkpoint, the others have built the model on the meta device."""
    torch.manual_seed(3)
    sharded = FSDP(layers() if dist.get_rank() == 0 else on_meta(layers))
    torch.manual_seed(3)
    expected = layers().state_dict()
    whole = sharded.gather_full_params() | dict(sharded.named_buffers())
    assert all(torch.equal(whole[name], tensor) for name, tensor in expected.items())


def test_the_first_ranks_values_for_ranks_that_have_none():
    run_ranks(3, one_rank_has_the_values)
