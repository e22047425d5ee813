"""How updated parameters travel: from their owners to everyone, in few messages and with little memory beside them."""

import torch
import torch.distributed as dist

LARGE = 1 << 20  # bytes from which a tensor travels alone, without being copied


def messages_of(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
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
    a rank sends (n - 1)/n of all bytes if the shares are equal. Memory for the time: the small tensors once more.
    """
    sent = []
    for owner, tensors in enumerate(shares):
        for message in messages_of([tensor.detach() for tensor in tensors]):
            flat = message[0] if len(message) == 1 and message[0].is_contiguous() else _flat(message)
            work = dist.broadcast(flat, group=group, group_src=owner, async_op=True)
            sent.append((work, flat, message))
    for work, flat, message in sent:
        work.wait()
        if flat is not message[0]:
            for tensor, values in zip(message, flat.split([each.numel() for each in message]), strict=True):
                tensor.copy_(values.view_as(tensor))


def _flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
