"""This rank's number, its group and the group's size: `get` looks them up among all ranks or in a device mesh."""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

WHAT = ("ws", "pg", "rank", "grank", "lrank")


class cache_mesh:
    """A decorator that remembers a device mesh for a function `f(what, mesh)`.

    Then `f(what)` uses the mesh that `f.register_mesh(mesh)` has stored, and `f(what, mesh)` uses `mesh`.
    """

    def __init__(self, function: Callable[[str, DeviceMesh | None], Any]):
        functools.update_wrapper(self, function)
        self.function = function
        self.mesh: DeviceMesh | None = None

    def register_mesh(self, mesh: DeviceMesh | None) -> "cache_mesh":
        """Store `mesh` for later calls and return this object; None forgets the mesh."""
        self.mesh = mesh
        return self

    def __call__(self, what: str, dm: DeviceMesh | None = None) -> Any:
        return self.function(what, self.mesh if dm is None else dm)


@cache_mesh
def get(what: str, dm: DeviceMesh | None = None) -> int | dist.ProcessGroup:
    """Look up one fact about this rank: in the mesh `dm`, else in the registered mesh, else among all ranks.

    "ws"     number of ranks in the mesh (without one: of all ranks)
    "pg"     the mesh's process group (without one: the default group)
    "rank"   this rank's number in that group
    "grank"  this rank's number among all ranks, with or without a mesh
    "lrank"  with a mesh the rank in it, else LOCAL_RANK: the rank on this machine

    Dimensions of size 1 are ignored. A mesh with several others is ambiguous: pass `mesh["name"]`.
    Raises ValueError for any other `what`, an ambiguous mesh and a mesh that this rank is not in, RuntimeError if there
    is no process group yet, KeyError if LOCAL_RANK, which torchrun and rank cells set, is not there.
    """
    if what not in WHAT:
        raise ValueError(f"get() knows {', '.join(map(repr, WHAT))}; got {what!r}")
    if what == "lrank" and dm is None:
        return int(os.environ["LOCAL_RANK"])
    if not dist.is_initialized():
        raise RuntimeError("there is no process group yet: in a notebook run %dist_init, else init_process_group()")
    if what == "grank":
        return dist.get_rank()
    group = dist.group.WORLD if dm is None else _only_group(dm)
    if what == "pg":
        return group
    return dist.get_world_size(group) if what == "ws" else dist.get_rank(group)


def _only_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not in this mesh, which holds the ranks {mesh.mesh.tolist()}")
    # A mesh of shape (1, 4) is one row of four ranks. If all dimensions have size 1, each holds this rank alone.
    several = [dim for dim in range(mesh.ndim) if mesh.size(dim) > 1] or [mesh.ndim - 1]
    if len(several) > 1:
        example = mesh.mesh_dim_names[several[0]] if mesh.mesh_dim_names else "name"
        raise ValueError(f'a mesh of shape {tuple(mesh.shape)} is ambiguous: pass one dimension, mesh["{example}"]')
    return mesh.get_group(several[0])
