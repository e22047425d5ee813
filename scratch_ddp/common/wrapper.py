"""What every wrapper of a model has in common: the group of ranks it works in, and the switch for synchronisation."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


class SyncSwitch:
    """Says whether gradients are synchronised. A wrapper inherits from it beside `torch.nn.Module`."""

    _do_sync = True

    @property
    def do_sync(self) -> bool:
        """False inside `no_sync()` and after `disable_grad_sync()`."""
        return self._do_sync

    def enable_grad_sync(self) -> None:
        """Average gradients from now on."""
        self._do_sync = True

    def disable_grad_sync(self) -> None:
        """Leave each rank its own gradients from now on, so that micro-batches accumulate without communication."""
        self._do_sync = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate without communication: forward, backward and `sync_gradients` of a micro-batch stand inside."""
        before = self.do_sync
        self.disable_grad_sync()
        try:
            yield
        finally:  # after an exception too, and to "off" again where blocks are nested
            self._do_sync = before


def process_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    """Return the process group meant by a group, a one-dimensional mesh, or None (the default group, which stays None).

    None is kept, since the default group can be rebuilt under a living model. Dimensions of size 1 don't count.
    """
    if not dist.is_initialized():
        raise RuntimeError("there is no process group yet: run under torchrun and call dist.init_process_group() first")
    if isinstance(group, DeviceMesh):
        wide = [dim for dim in range(group.ndim) if group.size(dim) > 1] or [0]
        if len(wide) > 1:
            raise ValueError(f"the mesh has {len(wide)} dimensions: pass the one to spread over, as in mesh['dp']")
        if group.get_coordinate() is None:
            raise ValueError(f"rank {dist.get_rank()} is not in the mesh: build the model on the mesh's ranks only")
        group = group.get_group(wide[0])
    if group is not None and dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group: build the model on the group's ranks only")
    return group
