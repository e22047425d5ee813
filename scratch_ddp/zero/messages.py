"""How updated parameters travel: from their owners to everyone, in few messages and with little memory beside them."""

from collections import deque
from collections.abc import Iterable

import torch
import torch.distributed as dist

LARGE = 1 << 20  # bytes from which a tensor travels alone, without being copied
IN_FLIGHT = 2  # messages that are under way while the next is prepared


def messages_of(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Split what one rank sends into messages: each large contiguous tensor alone, small ones of a dtype together."""
    alone, together = [], {}
    for tensor in tensors:
        if tensor.numel() * tensor.element_size() >= LARGE and tensor.is_contiguous():
            alone.append([tensor])
        elif tensor.numel():
            together.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return [*alone, *together.values()]


@torch.no_grad()
def broadcast_shares(shares: list[list[torch.Tensor]], group: dist.ProcessGroup | None = None) -> None:
    """Give every rank the values that rank r of the group has in the tensors of `shares[r]`, in place.

    Cost: a broadcast for each tensor of 1 MB or more, and for each rank and dtype one for all smaller ones. On a ring
    a rank sends (n - 1)/n of all bytes if the shares are equal. Memory for the time: some messages of small tensors.
    """
    under_way: deque[tuple[dist.Work, torch.Tensor, list[torch.Tensor]]] = deque()
    for owner, tensors in enumerate(shares):
        for message in messages_of(tensor.detach() for tensor in tensors):
            tensor = flat(message)
            work = dist.broadcast(tensor, group=group, group_src=owner, async_op=True)
            under_way.append((work, tensor, message))
            if len(under_way) > IN_FLIGHT:
                _finish(*under_way.popleft())
    while under_way:
        _finish(*under_way.popleft())


def _finish(work: dist.Work, values: torch.Tensor, message: list[torch.Tensor]) -> None:
    work.wait()
    spread(values, message)


def flat(message: list[torch.Tensor]) -> torch.Tensor:
    """A message's elements in one dimension, copied; a contiguous tensor that travels alone is its own message."""
    if len(message) == 1 and message[0].is_contiguous():
        return message[0]
    return torch.cat([tensor.reshape(-1) for tensor in message])


def spread(values: torch.Tensor, message: list[torch.Tensor]) -> None:
    """Put what `flat` made of a message back into its tensors."""
    if values is not message[0]:
        for tensor, part in zip(message, values.split([tensor.numel() for tensor in message]), strict=True):
            tensor.copy_(part.view_as(tensor))
