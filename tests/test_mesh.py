"""`get` and `cache_mesh`: this rank's number, its group and the group's size."""

import os

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from scratch_ddp.mesh import cache_mesh, get
from tests.ranks import run_ranks


def error(function, *args):
    """What kind of error the call raises, and its text."""
    with pytest.raises(Exception) as caught:
        function(*args)
    return f"{type(caught.value).__name__}: {caught.value}"


def everything(dm=None):
    return tuple(get(what, dm) for what in ("ws", "rank", "grank", "lrank"))


def test_what_it_does_not_know(monkeypatch):
    for what in ("ws", "pg", "rank", "grank"):
        assert error(get, what).startswith("RuntimeError: there is no process group yet")
    for what in ("world", None, ["ws"]):
        assert error(get, what).startswith("ValueError: get() knows 'ws', 'pg', 'rank', 'grank', 'lrank'; got ")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert get("lrank") == 3
    monkeypatch.delenv("LOCAL_RANK")
    assert error(get, "lrank").startswith("KeyError")


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


def test_a_dimension_of_a_larger_mesh():
    def ranks():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for what in ("ws", "pg", "rank", "lrank"):
            assert 'mesh["dp"]' in error(get, what, mesh)
        assert "ambiguous" in error(get, "ws", DeviceMesh("cpu", [[0, 1], [2, 3]]))
        get.register_mesh(mesh["dp"])
        return everything(mesh["dp"]), everything(mesh["tp"]), get("grank", mesh), get("rank"), get("rank", mesh["tp"])

    for r, (dp, tp, grank, registered, given) in enumerate(run_ranks(4, ranks)):
        assert dp == (2, r // 2, r, r // 2) and tp == (2, r % 2, r, r % 2) and grank == r
        assert (registered, given) == (r // 2, r % 2)


def test_a_mesh_without_this_rank():
    def ranks():
        mesh = DeviceMesh("cpu", [0, 2])
        return everything(mesh) if dist.get_rank() != 1 else (error(get, "rank", mesh), get("grank", mesh))

    inside, (refused, grank), last = run_ranks(3, ranks)
    assert inside == (2, 0, 0, 0) and last == (2, 1, 2, 1) and grank == 1
    assert refused.startswith("ValueError: rank 1 is not in this mesh, which holds the ranks [0, 2]")


def test_cache_mesh_uses_the_explicit_mesh_before_the_registered_one():
    def ranks():
        @cache_mesh
        def ask(what, dm=None):
            """What it says."""
            return what, dm

        first, second = (DeviceMesh("cpu", [0, 1], _init_backend=False) for _ in range(2))
        assert ask.register_mesh(first) is ask and ask.mesh is first
        assert ask("x")[1] is first and ask("x", second)[1] is ask("x", dm=second)[1] is second
        assert ask.register_mesh(None)("x") == ("x", None)
        assert ask.__doc__ == "What it says." and ask.__name__ == "ask"

    run_ranks(2, ranks)
