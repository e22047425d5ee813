"""Computed and sent in half precision, with master weights, gradients and optimizer state in float32."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.fsdp import FSDP
from scratch_ddp.instruments.traffic import traffic
from tests.ddp.cases import batches, shard
from tests.ranks import in_turn


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 6))


def halves(dtype: torch.dtype) -> None:
    """Computed and sent in half precision, kept in full."""
    sharded = FSDP(model(), compute_dtype=dtype)
    seen: set[torch.dtype] = set()
    for module in sharded.module:
        module.register_forward_hook(lambda m, args, out: seen.update([args[0].dtype, out.dtype]))
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.01)
    x, y = (shard(rows, dist.get_rank()).float() for rows in batches(1, 2)[0])
    losses = []
    for _ in range(20):
        loss = nn.functional.mse_loss(sharded(x).float(), y)
        with traffic() as counted:
            loss.backward()
            sharded.sync_gradients()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert seen == {dtype} and losses[-1] < 0.9 * losses[0]
    state = [tensor.dtype for each in optimizer.state.values() for tensor in each.values()]
    assert {parameter.dtype for parameter in sharded.parameters()} == set(state) == {torch.float32}
    assert all(tensor.dtype == torch.float32 for tensor in sharded.gather_full_params().values())
    first, norm, _, last = (sum(each.numel() for each in module.parameters()) for module in sharded.module)
    # This rank's rows of what is gathered again (the last unit is still there), and all that is reduced.
    assert counted.payload_bytes == 2 * ((first + norm) // 2 + first + norm + last)


class Remembering(nn.Linear):
    """A layer that takes its inputs from containers, and writes to a cache of its caller."""

    def forward(self, inputs, cache):
        cache["seen"].append(inputs["pair"][0].dtype)
        y = super().forward(inputs["pair"][0] * inputs["pair"][1])
        return {"pair": (y, y)}, cache


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Remembering(2, 2), Remembering(2, 2)])

    def forward(self, inputs, cache):
        for layer in self.layers:
            inputs, cache = layer(inputs, cache)
        return inputs["pair"][0]


def containers(dtype: torch.dtype | None) -> None:
    """Inputs in containers are converted, and a caller's cache stays its own."""
    cache = {"seen": []}
    FSDP(Nested(), compute_dtype=dtype)({"pair": (torch.ones(1, 2), torch.ones(1, 2))}, cache).sum().backward()
    assert cache["seen"] == [dtype or torch.float32] * 2


def accumulated() -> None:
    """256 gradients of 1 + 2⁻⁷, whose sum in bfloat16 would stop growing at 256; and a sum that float16 can't hold."""
    sharded = FSDP(nn.Sequential(nn.Linear(1, 1, bias=False)), compute_dtype=torch.bfloat16)
    x = torch.tensor([[1 + 2**-7]])
    with sharded.no_sync():
        for _ in range(255):
            sharded(x).sum().backward()
    sharded(x).sum().backward()
    large = FSDP(nn.Sequential(nn.Linear(1, 4, bias=False)), compute_dtype=torch.float16)
    large(torch.full((1, 1), 49152.0)).sum().backward()
    sharded.sync_gradients(), large.sync_gradients()
    sums = [model.gather_full_grads()["0.weight"].max().item() for model in (sharded, large)]
    assert sums == [pytest.approx(256 * (1 + 2**-7), rel=0.001), 49152.0]


def scaled() -> None:
    """A gradient that overflows in one rank's rows only: with torch's scaler all ranks skip that step alone."""
    sharded = FSDP(nn.Sequential(nn.Linear(1, 2, bias=False)), compute_dtype=torch.float16)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor, steps in ((1.0, True), (40000.0, False), (1.0, True)):
        before = sharded.gather_full_params()["0.weight"]
        output = sharded(torch.ones(1, 1)) * torch.tensor([[1.0, factor]])
        scaler.scale(output.float().sum()).backward()
        sharded.sync_gradients()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(before, sharded.gather_full_params()["0.weight"]) != steps
    assert scaler.get_scale() == 2.0


CHECKS = {
    2: [
        *((halves, dtype) for dtype in (torch.bfloat16, torch.float16)),
        *((containers, dtype) for dtype in (None, torch.bfloat16)),
        *((accumulated,), (scaled,)),
    ],
    3: [(scaled,)],  # the third rank has no row at all
}


@pytest.mark.parametrize("world_size", CHECKS)
def test_half_precision(world_size):
    in_turn(world_size, lambda check, *args: check(*args), CHECKS[world_size])
