"""Models and losses that a wrapper must get right, and the one process that it must equal."""

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

from scratch_ddp.ddp import BucketedDDP, FlatDDP, OverlappedDDP, SimpleDistributedDataParallelism
from scratch_ddp.fsdp import FSDP
from scratch_ddp.instruments.traffic import Counted

STRATEGIES = [SimpleDistributedDataParallelism, FlatDDP, OverlappedDDP, BucketedDDP]
# Those that work from gradient hooks; buckets so small that each has a few gradients at most.
HOOKED = [OverlappedDDP, functools.partial(BucketedDDP, bucket_mb=100 / 2**20)]
ROWS = 8  # a rank's share of a batch


@dataclass
class Case:
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor] = lambda model, x, y: mse_loss(model(x), y)
    whole_batch: bool = True  # False: the mean of the shards' losses, one after the other, is what n ranks compute


class Made(nn.Module):
    """Made of parts: modules, lists of them, parameters. `forward` is called with this module and its input."""

    def __init__(self, forward: Callable, **parts: nn.Module | list[nn.Module] | nn.Parameter):
        super().__init__()
        self.compute = forward
        for name, part in parts.items():
            setattr(self, name, nn.ModuleList(part) if isinstance(part, list) else part)

    def forward(self, *args, **kwargs):
        return self.compute(self, *args, **kwargs)


def linear(count: int) -> list[nn.Module]:
    return [nn.Linear(6, 6) for _ in range(count)]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6))


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False))
    model[2].weight = model[0].weight
    return model


def routed(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Rows with a positive first column take one expert, the others the other one; a third is never used."""
    right = x[:, 0] > 0
    y = torch.zeros_like(x)
    for expert, rows in ((self.experts[0], right), (self.experts[1], ~right)):
        if rows.any():
            y[rows] = expert(x[rows])
    return y


def mixed() -> nn.Module:
    """Two dtypes, apart, so that each keeps its own precision; and a parameter without elements."""

    def forward(self, x):
        return torch.cat([self.wide(x), self.narrow(x.float()).double()]) + self.nothing.sum()

    wide, narrow = nn.Linear(6, 6).double(), nn.Linear(6, 6).float()
    return Made(forward, wide=wide, narrow=narrow, nothing=nn.Parameter(torch.empty(0, 6)))


def frozen() -> nn.Module:
    model = mlp()
    model[0].weight.requires_grad_(False)
    return model


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))


def convolution() -> nn.Module:
    layers = nn.Sequential(nn.Unflatten(1, (2, 3, 1)), nn.Conv2d(2, 4, (2, 1)), nn.Flatten(), nn.Linear(8, 6))
    return layers.to(memory_format=torch.channels_last)


def complex_numbers() -> nn.Module:
    turn = nn.Parameter(torch.randn(6, dtype=torch.complex128))
    return Made(lambda self, x: (self.layer(x) * self.turn).real, layer=nn.Linear(6, 6), turn=turn)


def two_forwards(model, x, y):
    return (mse_loss(model(x), y) + mse_loss(model(x.flip(1)), y)) / 2


CASES = {
    "mlp": Case(mlp),
    "tied": Case(tied),
    "frozen": Case(frozen),
    "unused": Case(lambda: Made(routed, experts=linear(3))),
    "several dtypes": Case(mixed, lambda model, x, y: mse_loss(model(x), y.repeat(2, 1))),
    "BatchNorm": Case(batch_norm, whole_batch=False),
    "two forwards": Case(mlp, two_forwards),
    "channels last": Case(convolution),
    "complex numbers": Case(complex_numbers),
}


def build(case: Case, seed: int = 0) -> nn.Module:
    """The case's model, float64 but for those that mix dtypes."""
    torch.manual_seed(seed)
    model = case.build()
    return model if case.build is mixed else model.double()


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


def values(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Parameters, gradients and buffers of a model by their names; of a wrapper those of its model, all whole."""
    plain = getattr(model, "module", model)
    if isinstance(model, FSDP):
        found, gradients = model.gather_full_params(), model.gather_full_grads()
    else:
        found = dict(plain.named_parameters(remove_duplicate=False))
        gradients = {name: each.grad for name, each in found.items()}
    return found | {f"gradient of {name}": each for name, each in gradients.items()} | dict(plain.named_buffers())


def assert_equal(mine: nn.Module, plain: nn.Module, told: object = "", atol: float = 1e-12) -> None:
    """All values are those of the plain model, or of another wrapper, on every rank."""
    found, expected = values(mine), values(plain)
    assert list(found) == list(expected)
    for name, right in expected.items():
        assert (found[name] is None) == (right is None), f"{told} {name}"
        if right is not None:
            allowed = atol if right.dtype == torch.float64 else max(atol, 1e-6)
            told_by = functools.partial("{} {}: {}".format, told, name)
            torch.testing.assert_close(found[name].data, right.data, rtol=0, atol=allowed, msg=told_by)


def compare_with_one_process(
    wrap: Callable[[nn.Module], nn.Module],
    case_name: str,
    *,
    cases: dict[str, Case] = CASES,
    make_optimizer: Callable = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    micro_batches: int = 1,
    frozen_from: int | None = None,
    atol: float = 1e-12,
) -> None:
    """Train both for three steps, from the step `frozen_from` on without the first layer."""
    case, rank, world_size = cases[case_name], dist.get_rank(), dist.get_world_size()
    alone, wrapped = build(case), wrap(build(case))
    optimizers = [make_optimizer(model.parameters()) for model in (alone, wrapped)]
    data = iter(batches(3 * micro_batches, world_size))
    for step in range(3):
        for model in (alone, wrapped.module) if step == frozen_from else ():
            next(model.children()).requires_grad_(False)
        for last in [False] * (micro_batches - 1) + [True]:
            x, y = next(data)
            one_process_step(case, alone, x, y, world_size)
            with contextlib.nullcontext() if last else wrapped.no_sync():
                case.loss(wrapped, shard(x, rank), shard(y, rank)).backward()
                wrapped.sync_gradients()
        for each in optimizers:
            each.step()
        assert_equal(wrapped, alone, f"step {step}", atol)
        if not isinstance(wrapped, FSDP):
            assert len(set(gathered(bits(wrapped.module)))) == 1, f"replicas differ after step {step}"
        for each in (*optimizers, alone):
            each.zero_grad(set_to_none=step % 2 == 0 or each is alone)
        wrapped.zero_grad()  # gradients that are zero are no longer None


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
