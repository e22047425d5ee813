"""The bytes of model states by formula: the paper's figures, and what real tensors on real ranks take and send."""

import pytest
import torch
import torch._dynamo  # noqa: F401  optimizers import it at first use: once here, not in every forked rank
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW

from scratch_ddp.ddp import FlatDDP
from scratch_ddp.instruments.cost import states
from scratch_ddp.instruments.cost.states import (
    BF16_COMPUTE,
    FP32,
    MIXED,
    STAGES,
    WIDE_GRADIENTS,
    bytes_sent,
    measured_states,
    model_states,
)
from scratch_ddp.instruments.traffic import traffic
from scratch_ddp.zero import ShardedOptimizer, reduce_gradients
from tests.ranks import run_ranks


def test_the_figures_of_the_paper():
    """Figure 1: 7.5 billion parameters, 64 ranks, Adam in mixed precision; in 10⁹ bytes."""
    totals = [model_states(7_500_000_000, 64, stage, "Adam", MIXED).total / 1e9 for stage in STAGES]
    assert [round(total, 1) for total in totals] == [120.0, 31.4, 16.6, 1.9]
    sent = [bytes_sent(7_500_000_000, 64, stage, MIXED) / (2 * 7.5e9 * 63 / 64) for stage in STAGES]
    assert sent == [2, 2, 2, 3]
    assert bytes_sent(10, 2, "ZeRO-1", reduce_scatters=False) == 1.5 * bytes_sent(10, 2, "DDP")
    fsdp = [bytes_sent(10, 2, "ZeRO-3", each) for each in (WIDE_GRADIENTS, FP32)]  # gradients reduced in float32
    assert fsdp[0] / fsdp[1] == 2 / 3


def test_the_parts():
    found = model_states(1000, 4, "ZeRO-2", "SGD with momentum", MIXED)
    assert (found.weights, found.gradients, found.master, found.optimizer) == (2000, 500, 1000, 1000)
    assert model_states(1000, 4, "ZeRO-3", precision=BF16_COMPUTE, gathered=100).gathered == 400
    assert bytes_sent(1000, 4, "ZeRO-3", FP32, free_after_forward=False) == bytes_sent(1000, 4, "DDP") == 6000
    assert all(model_states(1000, 1, stage).total == 16_000 and bytes_sent(1000, 1, stage) == 0 for stage in STAGES)


@pytest.mark.parametrize(
    "wrong, says",
    [
        (lambda: model_states(10, 2, "zero"), "stage: 'zero'; allowed are DDP, ZeRO-1, ZeRO-2, ZeRO-3"),
        (lambda: model_states(10, 2, "DDP", "LBFGS"), "optimizer: 'LBFGS'; allowed are SGD"),
        (lambda: model_states(10, 0, "DDP"), "at least 1 rank and 0 parameters, not 0 and 10"),
        (lambda: bytes_sent(-1, 2, "DDP"), "at least 1 rank and 0 parameters, not 2 and -1"),
        (lambda: model_states(10, 2, "ZeRO-2", gathered=5), "under ZeRO-2 all parameters are whole"),
    ],
)
def test_bad_input(wrong, says):
    with pytest.raises(ValueError, match=says):
        wrong()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(32, 32) for _ in range(12)])  # shares that n = 2, 3 and 4 divide


def step_of(stage: str, optimizer_cls: type) -> tuple:
    """Train two steps; what is held before the second's update, and what the second step sends."""
    trained = FlatDDP(model()) if stage != "ZeRO-2" else model()
    make = optimizer_cls if stage == "DDP" else lambda params: ShardedOptimizer(params, optimizer_cls)
    optimizer = make(trained.parameters())
    sent = 0
    for _ in range(2):
        trained(torch.ones(2, 32) * dist.get_rank()).sum().backward()
        with traffic() as counted:
            reduce_gradients(optimizer) if stage == "ZeRO-2" else trained.sync_gradients()
        held = measured_states(trained, optimizer)
        with traffic() as updates:
            optimizer.step()
        optimizer.zero_grad()
        sent = counted.wire_bytes + updates.wire_bytes
    parameters = sum(parameter.numel() for parameter in trained.parameters())
    return parameters, held.weights, held.gradients, held.optimizer, sent


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("optimizer_cls", [SGD, AdamW], ids=["SGD", "AdamW"])
def test_real_ranks_hold_and_send_what_the_formulas_say(n, optimizer_cls):
    def all_stages():
        return [step_of(stage, optimizer_cls) for stage in STAGES[:3]]

    for stage, ranks in zip(STAGES, zip(*run_ranks(n, all_stages), strict=True), strict=False):
        parameters = ranks[0][0]
        expected = model_states(parameters, n, stage, optimizer_cls.__name__)
        steps = 24 * 4 / (n if stage != "DDP" else 1) if optimizer_cls is AdamW else 0  # Adam counts its steps
        for _, weights, gradients, optimizer, _ in ranks:
            assert (weights, gradients, optimizer) == (expected.weights, expected.gradients, expected.optimizer + steps)
        assert sum(sent for *_, sent in ranks) == n * bytes_sent(parameters, n, stage, reduce_scatters=False)


def test_a_storage_counts_once():
    tied = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
    tied[1].weight = nn.Parameter(tied[0].weight.detach())  # two parameters in the same memory
    assert measured_states(tied, SGD(tied.parameters())).weights == 64
    assert states.ModelStates(1, 2, 3, 4, 5).total == 15
