"""What travels in a step: no more than what sharding needs."""

import copy

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from scratch_ddp.fsdp import FSDP
from scratch_ddp.instruments.traffic import traffic
from tests.ddp.cases import batches, build, shard
from tests.fsdp.cases import CASES
from tests.ranks import run_ranks


def one_step(**settings) -> tuple:
    case, world_size = CASES["adapters"], dist.get_world_size()
    model = build(case)
    model.requires_grad_(True)
    sharded = FSDP(copy.deepcopy(model), **settings)
    x, y = batches(1, world_size)[0]
    counted = []
    for _ in range(2):
        with traffic() as step:
            case.loss(sharded, shard(x, dist.get_rank()), shard(y, dist.get_rank())).backward()
            sharded.sync_gradients()
        counted.append(step)
    elements = sum(parameter.numel() for parameter in model.parameters())
    block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    return counted[1].calls, counted[1].wire_bytes / 8, counted[1].setup.calls, elements, block


def test_one_all_gather_and_one_reduce_scatter_a_unit():
    for calls, sent, apart, elements, block in run_ranks(2, one_step):
        # Three units, the root is one of them. It and the last one stay between forward and backward.
        assert calls == {"all_gather": 3 + 1, "reduce_scatter": 3} and apart == {"all_reduce": 3}
        assert sent == (2 * elements + block) / 2  # (n-1)/n of all twice, of a block once more


def test_units_that_stay_after_forward_are_not_gathered_again():
    for calls, sent, _, elements, _ in run_ranks(2, lambda: one_step(free_after_forward=False)):
        assert calls == {"all_gather": 3, "reduce_scatter": 3} and sent == 2 * elements / 2


def bytes_on_a_mesh() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    sharded, each = FSDP(model, mesh), 8 * 8 * 4
    with traffic() as counted:
        sharded(torch.ones(1, 8)).sum().backward()
        sharded.sync_gradients()
    assert counted.calls == {"all_gather": 3, "reduce_scatter": 2, "all_reduce": 2}  # the last unit stays for backward
    # Each rank gives a shard to each all-gather and all-reduce, and a whole unit to each reduce-scatter. It sends half
    # of a unit in each of the row's collectives, and a shard in each of the column's.
    assert counted.payload_bytes == (3 + 2) * each // 2 + 2 * each
    assert counted.collective_bytes == (3 + 2 + 2) * each // 2


def test_the_bytes_of_both_groups_of_a_mesh_are_counted():
    run_ranks(4, bytes_on_a_mesh)
