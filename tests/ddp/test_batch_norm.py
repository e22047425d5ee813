"""SyncBatchNorm in a model is one process's BatchNorm over all ranks' rows; what can't be converted is named."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from scratch_ddp.ddp import SyncBatchNorm
from scratch_ddp.instruments.traffic import traffic
from tests.ranks import in_turn


class Activated(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x).relu()


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4)
    ).double()


def trained() -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    alone, synced = build(), SyncBatchNorm.convert(build(), init_device_mesh("cpu", (n,)))
    whole = torch.randn(7, 2, 4, 4, dtype=torch.float64)
    mine = whole.tensor_split(n)[rank]
    for _ in range(2):
        with traffic() as counted:
            y = synced(mine)
            y.square().sum().backward()
        expected = alone(whole)
        expected.square().sum().backward()
        assert counted.calls == {"all_reduce": 4}  # two norms, forward and backward
        torch.testing.assert_close(y, expected.tensor_split(n)[rank])
        for mine_, its in zip(synced.parameters(), alone.parameters(), strict=True):
            dist.all_reduce(mine_.grad)
            torch.testing.assert_close(mine_.grad, its.grad)
        synced.zero_grad(), alone.zero_grad()
    torch.testing.assert_close(synced.state_dict(), alone.state_dict())
    with traffic() as counted:
        torch.testing.assert_close(synced.eval()(mine), alone.eval()(mine))
    assert counted.calls == {}


def in_half_precision() -> None:
    """As with BatchNorm, the result is in the input's precision, and what it is computed from in the weight's."""
    torch.manual_seed(0)
    whole, rank, n = (100 + torch.randn(9, 3)).bfloat16(), dist.get_rank(), dist.get_world_size()
    y = SyncBatchNorm.convert(nn.BatchNorm1d(3))(whole.tensor_split(n)[rank])
    torch.testing.assert_close(y, nn.BatchNorm1d(3)(whole).tensor_split(n)[rank])


def test_conversion_keeps_the_tensors_and_names_what_it_cannot_convert():
    model = build()
    before = copy.copy(list(model.parameters()))
    converted = SyncBatchNorm.convert(model)
    assert converted is model and all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert [type(each).__name__ for each in model].count("SyncBatchNorm") == 2
    assert type(SyncBatchNorm.convert(nn.BatchNorm1d(3))) is SyncBatchNorm
    twice = nn.ModuleList([nn.BatchNorm1d(3)] * 2)
    assert SyncBatchNorm.convert(twice)[0] is twice[1] and type(twice[1]) is SyncBatchNorm
    for norm in (nn.BatchNorm1d(3, affine=False), Activated(3)):
        with pytest.raises(ValueError, match="the norm '0' can't be synchronized: it needs BatchNorm's forward, a wei"):
            SyncBatchNorm.convert(nn.Sequential(norm))


def too_few_rows() -> None:
    """One row over all ranks is refused as by BatchNorm."""
    model = SyncBatchNorm.convert(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    for rows in (1, 0):
        with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
            model(torch.ones(rows if dist.get_rank() == 0 else 0, 2))
    assert model[1].running_var.tolist() == [1] * 3
    model(torch.ones(1, 2))  # on each rank


def test_a_converted_model_trains_as_one_process():
    in_turn(3, lambda check: check(), [(trained,), (in_half_precision,), (too_few_rows,)])
