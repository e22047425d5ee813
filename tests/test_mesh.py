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
    return type(caught.value).__name__, str(caught.value)


def everything(dm=None):
    return tuple(get(what, dm) for what in ("ws", "rank", "grank", "lrank"))


def test_without_a_process_group(monkeypatch):
    for what in ("ws", "pg", "rank", "grank"):
        kind, text = error(get, what)
        assert kind == "RuntimeError" and what in text and "init_process_group" in text
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert get("lrank") == 3
    monkeypatch.delenv("LOCAL_RANK")
    assert error(get, "lrank")[0] == "RuntimeError"


@pytest.mark.parametrize("what", ["world", "", None, 3, ["ws"]])
def test_an_unknown_key_names_what_is_known(what):
    kind, text = error(get, what)
    assert kind == "ValueError"
    assert all(f"'{key}'" in text for key in ("ws", "pg", "rank", "grank", "lrank"))


def test_all_ranks():
    def ranks():
        os.environ["LOCAL_RANK"] = str(dist.get_rank() % 2)
        return everything(), get("pg") is dist.group.WORLD

    assert run_ranks(3, ranks) == [((3, r, r, r % 2), True) for r in range(3)]


def test_one_dimension_and_dimensions_of_size_one():
    def ranks():
        os.environ["LOCAL_RANK"] = "7"  # not read when there is a mesh
        line = DeviceMesh("cpu", [0, 1, 2])
        row, column = DeviceMesh("cpu", [[0, 1, 2]]), DeviceMesh("cpu", [[0], [1], [2]])
        alone = DeviceMesh("cpu", [[dist.get_rank()]], _init_backend=False)
        shuffled = DeviceMesh("cpu", [2, 0, 1])
        return (
            [everything(mesh) for mesh in (line, row, column)],
            [dist.get_world_size(get("pg", mesh)) for mesh in (line, row, column)],
            get("grank", alone),
            get("rank", shuffled) == dist.get_rank(shuffled.get_group()),
        )

    for r, (answers, sizes, alone, shuffled) in enumerate(run_ranks(3, ranks)):
        assert answers == [(3, r, r, r)] * 3
        assert sizes == [3] * 3
        assert alone == r and shuffled


def test_a_world_of_one():
    assert run_ranks(1, lambda: everything(DeviceMesh("cpu", [[0]]))) == [(1, 0, 0, 0)]


def test_a_dimension_of_a_larger_mesh():
    def ranks():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        unnamed = DeviceMesh("cpu", [[0, 1], [2, 3]])
        whole = [error(get, what, mesh) for what in ("ws", "pg", "rank", "lrank")]
        return everything(mesh["dp"]), everything(mesh["tp"]), get("grank", mesh), whole, error(get, "ws", unnamed)

    for r, (dp, tp, grank, whole, unnamed) in enumerate(run_ranks(4, ranks)):
        assert dp == (2, r // 2, r, r // 2)
        assert tp == (2, r % 2, r, r % 2)
        assert grank == r
        assert all(kind == "ValueError" and 'mesh["dp"]' in text for kind, text in whole)
        assert unnamed[0] == "ValueError" and "mesh_dim_names" in unnamed[1]


def test_a_mesh_without_this_rank():
    def ranks():
        mesh = DeviceMesh("cpu", [0, 2])
        if dist.get_rank() == 1:
            return [error(get, what, mesh) for what in ("ws", "pg", "rank", "lrank")], get("grank", mesh)
        return everything(mesh)

    inside, outside, last = run_ranks(3, ranks)
    assert inside == (2, 0, 0, 0) and last == (2, 1, 2, 1)
    refused, grank = outside
    assert grank == 1
    assert all(kind == "ValueError" and "rank 1" in text and "[0, 2]" in text for kind, text in refused)


def test_what_is_no_mesh():
    for call in (lambda: get("rank", [0, 1]), lambda: get("lrank", "dp"), lambda: get.register_mesh(4)):
        kind, text = error(call)
        assert kind == "TypeError" and "DeviceMesh" in text


def test_cache_mesh_uses_the_explicit_mesh_before_the_registered_one():
    def ranks():
        @cache_mesh
        def ask(what, dm=None):
            """What it says."""
            return what, dm

        first, second = (DeviceMesh("cpu", [0, 1], _init_backend=False) for _ in range(2))
        returned = ask.register_mesh(first)
        return (
            returned is ask and ask.mesh is first,
            ask("x")[1] is first,
            ask("x", second)[1] is second,
            ask("x", dm=second)[1] is second,
            ask.register_mesh(None)("x") == ("x", None),
            ask.__doc__ == "What it says." and ask.__name__ == "ask",
        )

    assert run_ranks(2, ranks) == [(True,) * 6] * 2


def test_registered_mesh_serves_get():
    def ranks():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        get.register_mesh(mesh["dp"])
        return get("rank"), get("grank"), get("ws"), get("rank", mesh["tp"])

    assert run_ranks(4, ranks) == [(r // 2, r, 2, r % 2) for r in range(4)]
