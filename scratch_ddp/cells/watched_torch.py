"""Two places where torch waits in C++ past every process group, made interruptible; and who is in a group.

Functional collectives (DTensor, tensor parallelism) hand their operation straight to gloo and wait for it by tensor;
`new_group` ends with a barrier over the store that reaches all ranks, also those outside of the group.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from scratch_ddp.cells.watched_work import describe_tensor, run_in_helper

_store_barrier = dist.distributed_c10d._store_based_barrier
_wait_tensor = functional.wait_tensor


def make_interruptible() -> None:
    """Take the place of torch's two functions in this process. Calling it again changes nothing."""
    dist.distributed_c10d._store_based_barrier = _wait_at_store_barrier
    functional.wait_tensor = _wait_for_tensor


def ranks_of(group_name: str) -> list[int] | None:
    """The ranks of this process's group of that name, by their numbers among all; None if there is none now."""
    for group, name in list(dist.distributed_c10d._world.pg_names.items()):
        if name == group_name:
            return dist.get_process_group_ranks(group)
    return None


def _wait_at_store_barrier(rank: int, store: dist.Store, group_name: str, *args: Any, **kwargs: Any) -> None:
    __tracebackhide__ = True
    call = {"operation": "new_group", "group": group_name, "number": 0, "given": "", "peer": ""}
    run_in_helper(lambda: _store_barrier(rank, store, group_name, *args, **kwargs), call)


def _wait_for_tensor(tensor: torch.Tensor) -> torch.Tensor:
    __tracebackhide__ = True
    if type(tensor) is torch.Tensor and not torch.compiler.is_compiling():
        same_memory = tensor.detach()  # torch finds the operation by the memory; autograd stays with the call below
        call = {"operation": "a functional collective", "group": "", "number": 0, "peer": ""}
        run_in_helper(
            lambda: torch.ops._c10d_functional.wait_tensor(same_memory), call | {"given": describe_tensor(tensor)}
        )
    return _wait_tensor(tensor)
