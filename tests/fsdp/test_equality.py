"""n ranks with a share of the model each do what one process does with all of it: step by step, in float64."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from scratch_ddp.fsdp import FSDP
from tests.ddp.cases import assert_equal, batches, build, compare_with_one_process, shard
from tests.fsdp.cases import CASES
from tests.ranks import in_turn, run_ranks

OPTIM = torch.optim
OPTIMIZERS = {
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


def compare(case: str, settings: dict, comparison: dict) -> None:
    """`settings` of the FSDP, whose group may be the shape of a mesh."""
    shape = settings.get("group")
    mesh = shape and init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    compare_with_one_process(lambda model: FSDP(model, **settings | {"group": mesh}), case, cases=CASES, **comparison)


def runs(cases, comparison=None, **settings) -> list[tuple[str, dict, dict]]:
    return [(case, settings, comparison or {}) for case in cases]


def optimized(name: str, cases) -> list[tuple[str, dict, dict]]:
    atol = 1e-2 if name == "Muon" else 1e-12  # it computes in bfloat16
    return runs(cases, {"make_optimizer": OPTIMIZERS[name], "atol": atol})


HARDEST = ["unused", "two forwards", "a unit twice", "segments", "reentrant segments", "adapters", "all recomputed"]
TWICE = {"micro_batches": 2}
RUNS = {  # on how many ranks, which cases with which settings
    1: runs(HARDEST),
    2: [
        *(runs(HARDEST, free_after_forward=False) + runs(HARDEST, prefetch=0) + runs(HARDEST, TWICE, prefetch=2)),
        *(runs(HARDEST, units=[torch.nn.Linear]) + runs(["mlp"], {"frozen_from": 1})),
        *(run for name in OPTIMIZERS for run in optimized(name, ["mlp"])),
    ],
    3: [*runs(CASES), *(run for name in list(OPTIMIZERS)[:2] for run in optimized(name, ["mlp", "tiny parameters"]))],
    # Each row of ranks holds a sharded model, and the rows are replicas of each other.
    4: runs(["mlp", "unused", "several dtypes", "BatchNorm", "a unit twice"], TWICE, group=(2, 2)),
    6: runs(["tied", "tiny parameters"], TWICE, group=(2, 3)),
}


@pytest.mark.parametrize("ranks", RUNS)
def test_equals_one_process(ranks):
    in_turn(ranks, compare, RUNS[ranks])


def lbfgs() -> None:
    """An optimizer that puts all parameters into one vector, and calls the model itself."""
    rank, (x, y) = dist.get_rank(), batches(1, 2)[0]
    alone, sharded = build(CASES["mlp"]), FSDP(build(CASES["mlp"]))
    for model, rows in ((alone, lambda t: t), (sharded, lambda t: shard(t, rank))):
        optimizer = OPTIM.LBFGS(model.parameters(), lr=0.1, max_iter=3)

        def closure(model=model, rows=rows, optimizer=optimizer):
            optimizer.zero_grad()
            loss = CASES["mlp"].loss(model, rows(x), rows(y))
            loss.backward()
            model.sync_gradients() if model is sharded else None
            return loss

        optimizer.step(closure)
    assert_equal(sharded, alone, atol=1e-9)


def test_lbfgs():
    run_ranks(2, lbfgs)
