"""Sending and receiving at the same time: messages of one rank to and from several others, all under way at once."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from scratch_ddp.collectives.checked import member_group


def send_recv(
    leaving: torch.Tensor, dst: int, arriving: torch.Tensor, src: int, group: dist.ProcessGroup | None = None
) -> None:
    """Send to `dst` while receiving from `src`, so that a whole ring can do it at the same time.

    If every rank sends first and then receives, all may wait for a receiver. Both tensors must be contiguous;
    `dst` and `src` are ranks IN THE GROUP, unlike elsewhere: neighbours are counted there. Nothing is checked.

    Cost: one message; the bytes of `leaving`. Depth 1.
    """
    exchange({dst: leaving}, {src: arriving}, member_group(group))


def exchange(
    leaving: Mapping[int, torch.Tensor], arriving: Mapping[int, torch.Tensor], group: dist.ProcessGroup
) -> None:
    """Send `leaving[i]` to rank i of the group while receiving `arriving[i]` from it. The tensors are contiguous."""
    if "ccl" in dist.get_backend_config(group):  # on GPUs a send may block a receive unless both come in one call
        operations = [dist.P2POp(dist.isend, tensor, group=group, group_peer=i) for i, tensor in leaving.items()]
        operations += [dist.P2POp(dist.irecv, tensor, group=group, group_peer=i) for i, tensor in arriving.items()]
        under_way = dist.batch_isend_irecv(operations) if operations else []
    else:
        # Sends first: gloo keeps a send until its receiver asks for it, and then one of gloo's threads sends it; if the
        # receiver had asked already, this thread would have to. And straight to the group: the checks of dist.isend and
        # dist.irecv, of arguments that are known to be right, take a quarter of a small message's time.
        under_way = [group.send([tensor], i, 0) for i, tensor in leaving.items()]
        under_way += [group.recv([tensor], i, 0) for i, tensor in arriving.items()]
    for work in under_way:
        work.wait()
