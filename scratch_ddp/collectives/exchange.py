"""Messages of one rank to and from several others, all under way at once."""

from collections.abc import Mapping

import torch
import torch.distributed as dist


def exchange(
    leaving: Mapping[int, torch.Tensor], arriving: Mapping[int, torch.Tensor], group: dist.ProcessGroup
) -> list[dist.Work]:
    """Begin to send `leaving[i]` to rank i of the group and to receive `arriving[i]` from it; return what to wait for.

    The tensors are contiguous, and belong to the group until then.
    """
    if "ccl" in dist.get_backend_config(group):  # on GPUs a send may hold up a receive unless both come in one call
        operations = [dist.P2POp(dist.isend, tensor, group=group, group_peer=i) for i, tensor in leaving.items()]
        operations += [dist.P2POp(dist.irecv, tensor, group=group, group_peer=i) for i, tensor in arriving.items()]
        return dist.batch_isend_irecv(operations) if operations else []
    # Sends first: gloo keeps what is sent until its receiver has asked for it, and then a thread of its own sends it;
    # where the receiver has asked already, this thread would have to. And from the group itself: dist.isend and
    # dist.irecv would check once more what is known, a quarter of a small message's time.
    sends = [group.send([tensor], i, 0) for i, tensor in leaving.items()]
    return sends + [group.recv([tensor], i, 0) for i, tensor in arriving.items()]


def wait(under_way: list[dist.Work]) -> None:
    """Return when all of it is through."""
    for work in under_way:
        work.wait()
