"""Ranks on a mesh in one process: each dimension is a group of its own, and what does not fit is said."""

import functools

import pytest
import torch
import torch.distributed as dist

from scratch_ddp.course.inputs.mesh_in_one_process import RanksOfMesh
from scratch_ddp.course.inputs.one_process import World
from tests.ranks import run_ranks

RANKS = torch.tensor([[2, 0, 4], [1, 5, 3]])


def play(act):
    def on_rank():
        registered = dict(dist.distributed_c10d._world.pg_names)
        world = World(functools.partial(RanksOfMesh(RANKS, ("host", "local")).run, act), [(rank,) for rank in range(6)])
        assert dict(dist.distributed_c10d._world.pg_names) == registered  # no group is left behind
        return world.complaint, world.results, [(counts.calls, counts.wire_bytes) for counts in world.counts]

    return run_ranks(1, on_rank)[0]


def test_collectives_along_the_dimensions():
    def act(number, mesh):
        local, between = mesh["local"].get_group(), mesh.get_group("host")
        part, total, most = torch.empty(1), torch.tensor([float(number)]), torch.tensor(number)
        dist.reduce_scatter(part, [torch.tensor([10.0 * place + number]) for place in range(3)], group=local)
        dist.all_reduce(total, group=between)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=local)
        gathered = torch.empty(2)
        dist.all_gather_into_tensor(gathered, total, group=between)
        places = mesh.get_local_rank("host"), mesh["local"].get_local_rank(), dist.get_world_size(local)
        return part.item(), total.item(), most.item(), gathered.tolist(), places

    complaint, results, counted = play(act)
    assert complaint == ""
    assert results[0] == (30 + 6.0, 5.0, 4, [5.0, 5.0], (0, 1, 3))
    assert results[3] == (60 + 9.0, 7.0, 5, [7.0, 7.0], (1, 2, 3))
    calls, wire_bytes = counted[0]
    assert calls == {"reduce_scatter": 1, "all_reduce": 2, "all_gather": 1}
    assert 8 + 4 + 10 + 4 <= wire_bytes <= 8 + 4 + 11 + 4  # of 8 bytes, 2 · 2/3 along "local"


@pytest.mark.parametrize(
    ("act", "complaint"),
    [
        (lambda number, mesh: dist.barrier(mesh["local"].get_group()) if number else None, "would wait for ever"),
        (
            lambda number, mesh: dist.all_reduce(torch.zeros(1 + number), group=mesh["host"].get_group()),
            "one rank of a group calls all_reduce of",
        ),
        (
            lambda number, mesh: dist.all_gather([torch.zeros(1)] * 2, torch.zeros(1), group=mesh["local"].get_group()),
            "all_gather of 1 elements into 2, in a group of 3 ranks",
        ),
        (lambda number, mesh: dist.broadcast(torch.zeros(1), 0, mesh["local"].get_group()), "calls broadcast"),
    ],
)
def test_what_goes_wrong_is_said(act, complaint):
    assert complaint in play(act)[0]
