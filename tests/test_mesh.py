"""`get` and `cache_mesh`: this rank's number, its group and the group's size."""

import os

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from scratch_ddp.mesh import cache_mesh, get
from tests.ranks import message_of, run_ranks


def everything(dm=None):
    return tuple(get(what, dm) for what in ("ws", "rank", "grank", "lrank"))


def test_what_it_does_not_know(monkeypatch):
    for what in ("ws", "pg", "rank", "grank"):
        with pytest.raises(RuntimeError, match="there is no process group yet"):
            get(what)
    for what in ("world", None, ["ws"]):
        with pytest.raises(ValueError, match="get.. knows 'ws', 'pg', 'rank', 'grank', 'lrank'; got "):
            get(what)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert get("lrank") == 3
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(KeyError):
        get("lrank")


def test_all_ranks_one_dimension_and_dimensions_of_size_one():
    def ranks():
        os.environ["LOCAL_RANK"] = "7"  # not read when there is a mesh
        meshes = [DeviceMesh("cpu", each) for each in ([0, 1, 2], [[0, 1, 2]], [[0], [1], [2]])]
        shuffled = DeviceMesh("cpu", [2, 0, 1])
        assert get("pg") is dist.group.WORLD and get("rank", shuffled) == dist.get_rank(shuffled.get_group())
        return [everything(mesh) for mesh in (None, *meshes)], [dist.get_world_size(get("pg", each)) for each in meshes]

    for r, (answers, sizes) in enumerate(run_ranks(3, ranks)):
        assert answers == [(3, r, r, 7)] + [(3, r, r, r)] * 3 and sizes == [3] * 3
    assert run_ranks(1, lambda: everything(DeviceMesh("cpu", [[0]]))) == [(1, 0, 0, 0)]


def test_a_dimension_of_a_larger_mesh_and_a_mesh_without_this_rank():
    def ranks():
        rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for what in ("ws", "pg", "rank", "lrank"):
            assert 'mesh["dp"]' in message_of(lambda what=what: get(what, mesh))
        assert "ambiguous" in message_of(lambda: get("ws", DeviceMesh("cpu", [[0, 1], [2, 3]])))
        get.register_mesh(mesh["dp"])
        assert everything(mesh["dp"]) == (2, rank // 2, rank, rank // 2)
        assert everything(mesh["tp"]) == (2, rank % 2, rank, rank % 2)
        assert (get("rank"), get("rank", mesh["tp"]), get("grank", mesh)) == (rank // 2, rank % 2, rank)
        part = DeviceMesh("cpu", [0, 2])
        if rank % 2 == 0:
            assert everything(part) == (2, rank // 2, rank, rank // 2)
        else:
            said = message_of(lambda: get("rank", part))
            assert said.startswith(f"rank {rank} is not in this mesh, which holds the ranks [0, 2]")

    run_ranks(4, ranks)


def test_cache_mesh_uses_the_explicit_mesh_before_the_registered_one():
    @cache_mesh
    def ask(what, dm=None):
        """What it says."""
        return what, dm

    def ranks():
        first, second = (DeviceMesh("cpu", [0, 1], _init_backend=False) for _ in range(2))
        assert ask.register_mesh(first) is ask and ask.mesh is first
        assert ask("x")[1] is first and ask("x", second)[1] is ask("x", dm=second)[1] is second
        assert ask.register_mesh(None)("x") == ("x", None)
        assert ask.__doc__ == "What it says." and ask.__name__ == "ask"

    run_ranks(2, ranks)
