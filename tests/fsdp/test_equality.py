"""n ranks with a share of the model each do what one process does with all of it: step by step, in float64."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from scratch_ddp.fsdp import FSDP
from tests.ddp.cases import batches, build, gathered, one_process_step, shard
from tests.fsdp.cases import CASES, assert_equal, message_of
from tests.ranks import run_ranks

STEPS = 3
OPTIM = torch.optim
OPTIMIZERS = {
    "SGD": lambda parameters: OPTIM.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: OPTIM.AdamW(parameters, lr=0.01),
    "AdamW, fused": lambda parameters: OPTIM.AdamW(parameters, lr=0.01, fused=True),
    # Whose update of an element depends on others, some of which are on other ranks.
    "Muon": lambda parameters: OPTIM.Muon([each for each in parameters if each.dim() == 2], lr=0.01),
    "Lamb": lambda parameters: Lamb(parameters, lr=0.1),
}


class Lamb(OPTIM.Optimizer):
    """An optimizer that torch does not have: its step is scaled by norms of whole tensors."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.sub_(each.grad * (group["lr"] * each.norm() / each.grad.norm()))


def compare_with_one_process(
    case_name: str,
    optimizer: str = "SGD",
    mesh: tuple[int, int] | None = None,
    micro_batches: int = 1,
    frozen_from: int = STEPS,
    **settings,
) -> None:
    """Train both for a few steps, from the step `frozen_from` on without the first layer."""
    case, rank, world_size = CASES[case_name], dist.get_rank(), dist.get_world_size()
    alone = build(case)
    group = None if mesh is None else init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    sharded = FSDP(build(case), group, **settings)
    optimizers = [OPTIMIZERS[optimizer](model.parameters()) for model in (alone, sharded)]
    data = iter(batches(STEPS * micro_batches, world_size))
    for step in range(STEPS):
        for layer in (next(alone.children()), next(sharded.children())) if step == frozen_from else ():
            layer.requires_grad_(False)
        for last in [False] * (micro_batches - 1) + [True]:
            x, y = next(data)
            one_process_step(case, alone, x, y, world_size)
            with contextlib.nullcontext() if last else sharded.no_sync():
                case.loss(sharded, shard(x, rank), shard(y, rank)).backward()
                sharded.sync_gradients()
        for each in optimizers:
            each.step()
        assert_equal(sharded, alone, step, atol=1e-12 if optimizer != "Muon" else 1e-2)  # which computes in bfloat16
        for each in (*optimizers, alone):
            each.zero_grad(set_to_none=step % 2 == 0 or each is alone)
        sharded.zero_grad()  # gradients that are zero are no longer None


HARDEST = ["mlp", "unused", "two forwards", "a unit twice", "another order", "segments", "reentrant segments"]
HARDEST += ["adapters", "penalty", "all recomputed", "several dtypes"]


def pairs(cases, **settings) -> list[tuple[str, dict]]:
    return [(case, settings) for case in cases]


RUNS = [  # on how many ranks, which cases with which settings
    *((ranks, pairs(CASES)) for ranks in (1, 2, 3)),
    (2, pairs(HARDEST, free_after_forward=False) + pairs(HARDEST, prefetch=0)),
    (2, pairs(HARDEST, micro_batches=2) + pairs(HARDEST, prefetch=2) + pairs(["mlp"], frozen_from=1)),
    (2, pairs(HARDEST, units=[torch.nn.Linear])),
    # Each row of ranks holds a sharded model, and the rows are replicas of each other.
    (4, pairs(["mlp", "unused", "several dtypes", "BatchNorm", "a unit twice"], mesh=(2, 2), micro_batches=2)),
    (6, pairs(["tied", "tiny parameters"], mesh=(2, 3), micro_batches=2)),
    (2, [pair for name in OPTIMIZERS for pair in pairs(["mlp"], optimizer=name)]),
    (3, [pair for name in list(OPTIMIZERS)[:3] for pair in pairs(["mlp", "tiny parameters"], optimizer=name)]),
]


@pytest.mark.parametrize(("ranks", "what"), RUNS)
def test_equals_one_process(ranks, what):
    def all_on_the_same_ranks():  # starting ranks takes longer than a case does
        for case, settings in what:
            try:
                compare_with_one_process(case, **settings)
            except Exception as error:
                error.add_note(f"the case is {case!r}, {settings}")
                raise

    run_ranks(ranks, all_on_the_same_ranks, timeout=120)


def lbfgs() -> None:
    """An optimizer that puts all parameters into one vector, and calls the model itself."""
    rank, (x, y) = dist.get_rank(), batches(1, 2)[0]
    alone, sharded = build(CASES["mlp"]), FSDP(build(CASES["mlp"]))
    losses = []
    for model, rows in ((alone, lambda t: t), (sharded, lambda t: shard(t, rank))):
        optimizer = OPTIM.LBFGS(model.parameters(), lr=0.1, max_iter=3)

        def closure(model=model, rows=rows, optimizer=optimizer):
            optimizer.zero_grad()
            loss = CASES["mlp"].loss(model, rows(x), rows(y))
            loss.backward()
            model.sync_gradients() if model is sharded else None
            losses.append(loss.item())
            return loss

        optimizer.step(closure)
    assert_equal(sharded, alone, atol=1e-9)


def test_lbfgs():
    run_ranks(2, lbfgs)


def adafactor() -> str:
    sharded = FSDP(build(CASES["mlp"]))
    sharded(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
    sharded.sync_gradients()
    return message_of(OPTIM.Adafactor(sharded.parameters()).step)


def test_what_torch_can_not_do_with_shards_raises_on_every_rank():
    assert all("in-place operations that require placement changes" in said for said in run_ranks(2, adafactor))


class Buffers(torch.nn.Module):
    """A cache that grows to another size on each rank, a mask that is made in forward, a counter that is replaced."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 6)
        self.register_buffer("cache", torch.ones(1, 1), persistent=False)
        self.register_buffer("mask", None, persistent=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        size = len(x) + dist.get_rank()
        self.cache = torch.ones(max(size, len(self.cache)), 1)
        self.mask = torch.ones(len(x), 1) if self.mask is None else self.mask
        self.seen = self.seen + 1 + dist.get_rank()
        return self.layer(x) * self.cache[: len(x)] * self.mask


def first_ranks_values() -> list[float]:
    torch.manual_seed(dist.get_rank())
    plain = Buffers()
    plain.seen += dist.get_rank()
    weights = gathered(plain.layer.weight.detach().clone())
    model = FSDP(plain)
    assert torch.equal(model.gather_full_params()["layer.weight"], weights[0])
    for step in range(2):
        loss = model(torch.ones(3, 6)).sum()
        loss.backward() if step or dist.get_rank() == 0 else None  # a rank without backward takes part
        model.sync_gradients()
    return [model.module.seen.item(), len(model.module.cache)]


def test_parameters_start_as_the_first_ranks_and_persistent_buffers_stay_so():
    assert run_ranks(2, first_ranks_values) == [[2.0, 3], [2.0, 4]]
