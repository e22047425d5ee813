"""Models and losses that a data-parallel strategy must get right, and the one process that it must equal."""

import contextlib
import copy
import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch._dynamo  # noqa: F401  optimizers and DDP import it at first use: once here, not in every forked rank
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from scratch_ddp.ddp import BucketedDDP, FlatDDP, OverlappedDDP, SimpleDistributedDataParallelism
from scratch_ddp.instruments.traffic import Counted

STRATEGIES = [SimpleDistributedDataParallelism, FlatDDP, OverlappedDDP, BucketedDDP]
HOOKED = {  # those that work from gradient hooks; buckets so small that each has a few gradients at most
    "OverlappedDDP": OverlappedDDP,
    "BucketedDDP": functools.partial(BucketedDDP, bucket_mb=100 / 2**20),
}
ROWS = 8  # a rank's share of a batch


@dataclass
class Case:
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor] = lambda model, x, y: mse_loss(model(x), y)
    whole_batch: bool = True  # False: the mean of the shards' losses, one after the other, is what n ranks compute


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Router(nn.Module):
    """Rows with a positive first column take one expert, the others the other one; a third is never used."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        right = x[:, 0] > 0
        y = torch.zeros_like(x)
        for expert, rows in ((self.experts[0], right), (self.experts[1], ~right)):
            if rows.any():
                y[rows] = expert(x[rows])
        return y


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(6, 6).double(), nn.Linear(6, 6).float()

    def forward(self, x):
        return torch.cat([self.wide(x), self.narrow(x.float()).double()])  # apart: each keeps its own precision


class WithEmpty(nn.Module):
    def __init__(self):
        super().__init__()
        self.nothing, self.layer = nn.Parameter(torch.empty(0, 6)), nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(x) + self.nothing.sum()


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Transposed(nn.Module):
    """A parameter whose memory is laid out column by column."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6).t())

    def forward(self, x):
        return x @ self.weight


def frozen() -> nn.Module:
    model = mlp()
    model[0].weight.requires_grad_(False)
    return model


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))


def convolution() -> nn.Module:
    layers = nn.Sequential(nn.Unflatten(1, (2, 3, 1)), nn.Conv2d(2, 4, (2, 1)), nn.Flatten(), nn.Linear(8, 6))
    return layers.to(memory_format=torch.channels_last)


def two_forwards(model, x, y):
    return (mse_loss(model(x), y) + mse_loss(model(x.flip(1)), y)) / 2


CASES = {
    "mlp": Case(mlp),
    "tied": Case(Tied),
    "frozen": Case(frozen),
    "unused": Case(Router),
    "several dtypes": Case(Mixed, lambda model, x, y: mse_loss(model(x), y.repeat(2, 1))),
    "empty parameter": Case(WithEmpty),
    "BatchNorm": Case(batch_norm, whole_batch=False),
    "checkpointing": Case(Checkpointed),
    "two forwards": Case(mlp, two_forwards),
    "transposed": Case(Transposed),
    "channels last": Case(convolution),
}


def build(case: Case, seed: int = 0) -> nn.Module:
    """The case's model, float64 but for those that mix dtypes."""
    torch.manual_seed(seed)
    model = case.build()
    return model if case.build is Mixed else model.double()


def batches(steps: int, world_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The global batches: ROWS rows a rank. Each rank's rows have their own sign in the first column at odd steps."""
    generator = torch.Generator().manual_seed(1)
    result = []
    for step in range(steps):
        x, y = torch.randn(2, ROWS * world_size, 6, generator=generator, dtype=torch.float64)
        if step % 2:  # so that one expert of the router is unused on some ranks
            x[:, 0] = x[:, 0].abs() * torch.tensor([1.0, -1.0]).repeat(world_size)[:world_size].repeat_interleave(ROWS)
        result.append((x, y))
    return result


def one_process_step(case: Case, model: nn.Module, x: torch.Tensor, y: torch.Tensor, world_size: int) -> None:
    """What n ranks should compute: the gradient of the whole batch, and rank 0's buffers."""
    if case.whole_batch:
        case.loss(model, x, y).backward()
        return
    before = copy.deepcopy(dict(model.named_buffers()))
    for rank in reversed(range(world_size)):
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
        (case.loss(model, shard(x, rank), shard(y, rank)) / world_size).backward()


def shard(rows: torch.Tensor, rank: int) -> torch.Tensor:
    return rows[rank * ROWS : (rank + 1) * ROWS]


def bits(model: nn.Module) -> str:
    """A digest of all bytes of parameters, gradients and buffers."""
    digest = hashlib.sha256()
    for tensor in [*model.parameters(), *(p.grad for p in model.parameters()), *model.buffers()]:
        digest.update(b"None" if tensor is None else tensor.detach().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def gathered(value: object) -> list:
    """Every rank's value."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextlib.contextmanager
def started() -> Iterator[list[int]]:
    """The sizes, in elements, of the all-reduces that this rank starts inside, in order; exchanges of bytes apart."""
    sizes, all_reduce = [], dist.all_reduce

    def noting(tensor, *args, **kwargs):
        if tensor.dtype != torch.uint8:
            sizes.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = noting
    try:
        yield sizes
    finally:
        dist.all_reduce = all_reduce


def calls(counted: Counted) -> dict[str, int]:
    """How many all-reduces and broadcasts `traffic` saw, and how many of either it counts apart."""
    apart = sum(counted.setup.calls.get(name, 0) for name in ("all_reduce", "broadcast"))
    return {name: counted.calls.get(name, 0) for name in ("all_reduce", "broadcast")} | {"apart": apart}
