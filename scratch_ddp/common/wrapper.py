"""What all wrappers of a model have in common: the switch for synchronisation, and the group of ranks they work in."""

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist

# Torch imports this with the first optimizer's step, and its functions' defaults then keep the default group alive. So
# gloo's threads outlive destroy_process_group(), and some end the process with SIGABRT. Here there is no group yet.
import torch.distributed.nn.functional  # noqa: F401
from torch.distributed.device_mesh import DeviceMesh

from scratch_ddp.common.agreement import compare

Group = dist.ProcessGroup | DeviceMesh | None  # what wrappers take: None means all ranks
_made = 0  # how many groups this process has made with `local_group`, or a higher number


class OnItsWay(torch.Tensor):
    """What stands in `.grad` from backward to `sync_gradients()`: nobody can compute with it.

    So it is noticed if `zero_grad()` clears it: the gradient that it stands for is thrown away.
    """

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> NoReturn:
        raise ValueError("gradients are on their way between backward and sync_gradients(): use them after it")


class SyncSwitch:
    """The switch that says whether gradients are synchronised. A wrapper inherits from it and `torch.nn.Module`."""

    do_sync = True  # False inside `no_sync()` and after `disable_grad_sync()`

    def enable_grad_sync(self) -> None:
        """Average gradients from now on."""
        self.do_sync = True

    def disable_grad_sync(self) -> None:
        """Leave each rank its own gradients from now on, so that micro-batches accumulate without communication."""
        self.do_sync = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate without communication. Run a micro-batch's forward, backward and `sync_gradients` inside."""
        before = self.do_sync
        self.do_sync = False
        try:
            yield
        finally:  # also after an exception; an inner block leaves the switch off
            self.do_sync = before


def process_group(group: Group) -> dist.ProcessGroup | None:
    """Return the process group meant by a group, a one-dimensional mesh, or None.

    None means the default group and stays None, since rank cells can replace the default group while a model uses it.
    Dimensions of size 1 don't count. Raises ValueError if the mesh has several others, or if this rank is not in the
    group, RuntimeError if there is no process group yet.
    """
    if not dist.is_initialized():
        raise RuntimeError("there is no process group yet: run under torchrun and call dist.init_process_group() first")
    outside = f"rank {dist.get_rank()} is not in the group: build the model on the group's ranks only"
    if isinstance(group, DeviceMesh):
        wide = [dim for dim in range(group.ndim) if group.size(dim) > 1] or [0]
        if len(wide) > 1:
            raise ValueError(f"the mesh has {len(wide)} dimensions: pass the one to spread over, as in mesh['dp']")
        if group.get_coordinate() is None:
            raise ValueError(outside)
        group = group.get_group(wide[0])
    if group is not None and dist.get_rank(group) < 0:
        raise ValueError(outside)
    return group


def local_group(group: dist.ProcessGroup | None, backend: str) -> dist.ProcessGroup:
    """Make another group of the same ranks, which these ranks alone call. Costs one small all-reduce besides.

    torch's own (`use_local_synchronization`) hangs where ranks have different numbers of groups, or destroyed one.
    """
    global _made
    _made = compare(group, {}, {"made": _made}).largest["made"] + 1
    c10d, ranks, backend = dist.distributed_c10d, dist.get_process_group_ranks(group), dist.Backend(backend)
    made, _ = c10d._new_process_group_helper(
        len(ranks),
        dist.get_rank(group),
        ranks,
        backend,
        c10d._get_default_store(),
        f"local {_made} of {ranks}",
        timeout=c10d._get_default_timeout(backend),
    )
    c10d._world.pg_group_ranks[made] = {rank: number for number, rank in enumerate(ranks)}
    return made
