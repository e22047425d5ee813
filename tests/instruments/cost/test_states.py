"""The bytes of model states by formula: the paper's figures, and what real tensors on real ranks take and send."""

import pytest
import torch
import torch._dynamo  # noqa: F401  optimizers import it at first use: once here, not in every forked rank
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from scratch_ddp.ddp import FlatDDP
from scratch_ddp.instruments.cost import FP32, MIXED, STAGES, WIDE_GRADIENTS, bytes_sent, measured_states, model_states
from scratch_ddp.instruments.traffic import traffic
from scratch_ddp.zero import ShardedOptimizer, reduce_gradients
from tests.ranks import run_ranks


def test_the_figures_of_the_paper():
    """Figure 1: 7.5 billion parameters, 64 ranks, Adam in mixed precision; in 10⁹ bytes."""
    totals = [model_states(7_500_000_000, 64, stage, MIXED).total / 1e9 for stage in STAGES]
    assert [round(total, 1) for total in totals] == [120.0, 31.4, 16.6, 1.9]
    sent = [bytes_sent(7_500_000_000, 64, stage, MIXED) / (2 * 7.5e9 * 63 / 64) for stage in STAGES]
    assert sent == [2, 2, 2, 3]
    assert bytes_sent(10, 2, "ZeRO-1", reduce_scatters=False) == 1.5 * bytes_sent(10, 2, "DDP")
    fsdp = [bytes_sent(10, 2, "ZeRO-3", each) for each in (WIDE_GRADIENTS, FP32)]  # gradients reduced in float32
    assert fsdp[0] / fsdp[1] == 2 / 3
    assert model_states(1000, 4, "ZeRO-3", MIXED, gathered=100).gathered == 400
    with pytest.raises(ValueError, match="stage: 'zero'; allowed are DDP"):
        model_states(10, 2, "zero")


def step_of(stage: str) -> tuple:
    """Train two steps; what is held before the second's update, and what the second step sends."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(12)])  # shares that n = 2, 3 and 4 divide
    trained = FlatDDP(model) if stage != "ZeRO-2" else model
    optimizer = (AdamW if stage == "DDP" else lambda params: ShardedOptimizer(params, AdamW))(trained.parameters())
    for _ in range(2):
        trained(torch.ones(2, 32) * dist.get_rank()).sum().backward()
        with traffic() as counted:
            reduce_gradients(optimizer) if stage == "ZeRO-2" else trained.sync_gradients()
        held = measured_states(trained, optimizer)
        with traffic() as updates:
            optimizer.step()
        optimizer.zero_grad()
    sent = counted.wire_bytes + updates.wire_bytes
    return sum(each.numel() for each in trained.parameters()), held.weights, held.gradients, held.optimizer, sent


@pytest.mark.parametrize("n", [2, 3, 4])
def test_real_ranks_hold_and_send_what_the_formulas_say(n):
    for stage, ranks in zip(STAGES, zip(*run_ranks(n, lambda: [*map(step_of, STAGES[:3])]), strict=True), strict=False):
        parameters = ranks[0][0]
        expected = model_states(parameters, n, stage)
        steps = 24 * 4 / (n if stage != "DDP" else 1)  # Adam counts its steps
        for _, weights, gradients, optimizer, _ in ranks:
            assert (weights, gradients, optimizer) == (expected.weights, expected.gradients, expected.optimizer + steps)
        assert sum(sent for *_, sent in ranks) == n * bytes_sent(parameters, n, stage, reduce_scatters=False)


def test_a_storage_counts_once():
    tied = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
    tied[1].weight = nn.Parameter(tied[0].weight.detach())  # two parameters in the same memory
    assert measured_states(tied, AdamW(tied.parameters())).weights == 64
