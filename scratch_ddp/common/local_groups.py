"""Process groups of some ranks, which these ranks alone make (`use_local_synchronization`)."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from scratch_ddp.common.agreement import compare

_made = 0  # how many groups this process has made under an agreed name, or a higher number


@contextlib.contextmanager
def agreed_name(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Give the group of these ranks that is made in the block the same name on all of them. One small all-reduce.

    torch names such a group by how many groups a rank has: where they have different numbers, it hangs.
    """
    global _made
    _made = compare(group, {}, {"made": _made}).largest["made"] + 1
    name, torchs = f"local {_made} of {dist.get_process_group_ranks(group)}", dist.distributed_c10d._process_group_name
    dist.distributed_c10d._process_group_name = lambda *_, **__: name
    try:
        yield
    finally:
        dist.distributed_c10d._process_group_name = torchs
