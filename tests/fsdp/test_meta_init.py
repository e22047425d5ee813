"""A model that no rank ever holds: built on the meta device, and given its values one module at a time."""

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.fsdp import FSDP
from tests.ddp.cases import gathered
from tests.ranks import in_turn


def layers() -> nn.Module:
    tied = nn.Linear(6, 6), nn.Linear(6, 6)
    tied[1].weight = tied[0].weight
    return nn.Sequential(*tied, nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7)), nn.BatchNorm1d(7), nn.LSTM(7, 5))


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return layers()


def initialised() -> None:
    """The model's own initialisation, the same values on every rank, whatever their seeds."""
    torch.manual_seed(dist.get_rank())
    sharded = FSDP(on_meta())
    whole = sharded.gather_full_params()
    assert whole["2.0.weight"].abs().max() <= 6**-0.5 and whole["2.0.weight"].std() > 0.1
    assert (whole["2.1.weight"] == 1).all() and (sharded.module[3].running_var == 1).all()
    assert sharded.module[0].weight is sharded.module[1].weight
    assert all(torch.equal(*gathered(tensor)) for tensor in whole.values())


def the_first_rank_has_values() -> None:
    """It has read a checkpoint, the others have built the model on the meta device."""
    torch.manual_seed(3)
    sharded = FSDP(layers() if dist.get_rank() == 0 else on_meta())
    torch.manual_seed(3)
    expected = layers().state_dict()
    whole = sharded.gather_full_params() | dict(sharded.named_buffers())
    assert all(torch.equal(whole[name], tensor) for name, tensor in expected.items())


def test_values_on_the_meta_device():
    in_turn(2, lambda check: check(), [(initialised,), (the_first_rank_has_values,)])
