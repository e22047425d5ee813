"""On a mesh of two dimensions each row of ranks holds a sharded model, and the rows are replicas of each other."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from scratch_ddp.fsdp import FSDP
from scratch_ddp.instruments.traffic import traffic
from tests.ddp.cases import batches, build, one_process_step, shard
from tests.fsdp.cases import CASES, assert_equal, message_of
from tests.ranks import run_ranks

MODELS = ["mlp", "tied", "unused", "several dtypes", "BatchNorm", "tiny parameters", "a unit twice", "checkpointing"]
WHOLE = {"replicated": ["0"]}


def mesh_of(rows: int, columns: int) -> DeviceMesh:
    return init_device_mesh("cpu", (rows, columns), mesh_dim_names=("replicate", "shard"))


def trained(mesh: DeviceMesh, name: str, **settings) -> None:
    """Two steps of two micro-batches each, clipped, as in one process."""
    case, rank, count = CASES[name], dist.get_rank(), dist.get_world_size()
    alone, sharded = build(case), FSDP(build(case), mesh, **settings)
    assert sharded.world_size == count
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (alone, sharded)]
    for step in range(2):
        for last, (x, y) in enumerate(batches(4, count)[2 * step : 2 * step + 2]):
            one_process_step(case, alone, x, y, count)
            with contextlib.nullcontext() if last else sharded.no_sync():
                case.loss(sharded, shard(x, rank), shard(y, rank)).backward()
                sharded.sync_gradients()
        if name != "several dtypes":  # torch would compute the norm of these in float32
            norm, right = sharded.clip_grad_norm_(0.5), torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
            torch.testing.assert_close(norm, right.double(), rtol=1e-9, atol=0)
        for optimizer in optimizers:
            optimizer.step()
        assert_equal(sharded, alone, step)
        for parameter in sharded.parameters():  # replicas have the same bits
            same = [torch.empty_like(parameter) for _ in range(mesh.size(0))]
            dist.all_gather(same, parameter.detach().contiguous(), group=mesh.get_group(0))
            assert all(torch.equal(each, parameter) for each in same)
        for optimizer in optimizers:
            optimizer.zero_grad()


def test_it_trains_as_one_process_does():
    def all_models():
        mesh = mesh_of(2, 2)
        for name in MODELS:
            trained(mesh, name)
        trained(mesh, "mlp", **WHOLE, prefetch=0, free_after_forward=False)

    run_ranks(4, all_models, timeout=120)


def test_on_six_ranks():
    run_ranks(6, lambda: (trained(mesh_of(3, 2), "tied"), trained(mesh_of(2, 3), "tiny parameters")), timeout=120)


def bytes_of_a_step() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
    sharded, each = FSDP(model, mesh_of(2, 2)), 8 * 8 * 4
    with traffic() as counted:
        sharded(torch.ones(1, 8)).sum().backward()
        sharded.sync_gradients()
    assert counted.calls == {"all_gather": 3, "reduce_scatter": 2, "all_reduce": 2}  # the last unit stays for backward
    # Each rank gives a shard to each all-gather and all-reduce, and a whole unit to each reduce-scatter. It sends half
    # of a unit in each of the row's collectives, and a shard in each of the column's.
    assert counted.payload_bytes == (3 + 2) * each // 2 + 2 * each
    assert counted.collective_bytes == (3 + 2 + 2) * each // 2


def test_the_bytes_of_both_groups_are_counted():
    run_ranks(4, bytes_of_a_step)


def out_of_step() -> list[str]:
    """The rows differ: one forgets to synchronise, then one clears its gradients."""
    mesh, (x, y) = mesh_of(2, 2), batches(1, 4)[0]
    sharded = FSDP(build(CASES["mlp"]), mesh)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    row = mesh.get_local_rank(0)

    def backward():
        CASES["mlp"].loss(sharded, shard(x, dist.get_rank()), shard(y, dist.get_rank())).backward()

    backward()
    said = [message_of(sharded.sync_gradients if row else optimizer.step, (ValueError, RuntimeError))]
    optimizer.zero_grad()
    backward()
    sharded.zero_grad() if row else None
    return [*said, message_of(sharded.sync_gradients)]


def test_rows_that_are_out_of_step():
    for step, cleared in run_ranks(4, out_of_step):
        assert "ranks 0, 1 begins" in step.replace("begin ", "begins ") and "ranks 2, 3 call" in step
        assert "rank 2: entry" in cleared and "gradients cleared since backward: 0.bias" in cleared


def saved(folder: str) -> None:
    sharded = FSDP(build(CASES["mlp"]), mesh_of(2, 2))
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.05)
    sharded(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
    sharded.sync_gradients()
    optimizer.step()
    sharded.save(folder, optimizer)
    whole = sharded.full_state_dict()
    assert bool(whole) == (dist.get_rank() == 0)
    if whole:
        torch.save(whole, f"{folder}.whole")


def loaded(folder: str, on_mesh: bool) -> None:
    sharded = FSDP(build(CASES["mlp"], seed=1), mesh_of(2, 2) if on_mesh else None)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.05)
    sharded.load(folder, optimizer)
    whole = torch.load(f"{folder}.whole")
    full = sharded.gather_full_params()
    assert all(torch.equal(full[name], whole[name]) for name in whole)
    again = FSDP(build(CASES["mlp"], seed=2), mesh_of(2, 2) if on_mesh else None)
    again.load_full_state_dict(whole if dist.get_rank() == 0 else None)
    full = again.gather_full_params()
    assert all(torch.equal(full[name], whole[name]) for name in whole)


@pytest.mark.parametrize(("ranks", "on_mesh"), [(4, True), (3, False)])
def test_saved_on_a_mesh_and_loaded_elsewhere(tmp_path, ranks, on_mesh):
    folder = str(tmp_path / "checkpoint")
    run_ranks(4, saved, folder)
    run_ranks(ranks, loaded, folder, on_mesh)
