"""The ring: how n ranks add up S bytes when each talks to its two neighbours only."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from scratch_ddp.collectives.checked import collective, member_group

# FOLDED: Messages of one rank to and from several others, all under way at once.


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


def send_recv(
    leaving: torch.Tensor, dst: int, arriving: torch.Tensor, src: int, group: dist.ProcessGroup | None = None
) -> None:
    """Send to `dst` while receiving from `src`, so that a whole ring can do it at the same time.

    If every rank sends first and then receives, all may wait for a receiver. Both tensors must be contiguous;
    `dst` and `src` are ranks IN THE GROUP, unlike elsewhere: neighbours are counted there. Nothing is checked.

    Cost: a message; the bytes of `leaving`. Depth 1.
    """
    wait(exchange({dst: leaving}, {src: arriving}, member_group(group)))


@collective(writes="tensor", sums=True)
def ring_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sum `tensor` over the ranks, in place, and return it. All ranks get the same bits.

    Cost: 2(n-1) messages and 2(n-1)/n·S bytes sent by each rank, which no algorithm can do
    with fewer (Patarasuk and Yuan 2009). Depth 2(n-1). Memory: S/n beside `tensor`.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    # Cut the tensor into n chunks. First each chunk's sum is to be complete on one rank,
    # then it goes to all.
    # answer: begin
    chunks = tensor.view(-1).tensor_split(n)
    buffer = torch.empty_like(chunks[0])  # the first chunks are the largest
    left, right = (rank - 1) % n, (rank + 1) % n
    for step in range(n - 1):  # reduce-scatter: a sum travels round and takes up every rank's part
        mine = chunks[(rank - step - 1) % n]
        send_recv(chunks[(rank - step) % n], right, buffer[: mine.numel()], left, group)
        mine += buffer[: mine.numel()]
    for step in range(n - 1):  # all-gather: the complete chunk travels round and every rank keeps it
        send_recv(chunks[(rank + 1 - step) % n], right, chunks[(rank - step) % n], left, group)
    # answer: end
    return tensor


# The two halves of the ring each on its own, to be called on chunks and looked at between. Nothing is checked.


def ring_reduce_scatter(chunks: list[torch.Tensor], group: dist.ProcessGroup | None = None) -> int:
    """Complete one chunk's sum on each rank, in place; return which: (rank + 1) % n. The others hold partial sums.

    `chunks`: n contiguous tensors, as `tensor.view(-1).tensor_split(n)` gives them, the same sizes on every rank.

    Cost: n-1 messages and (n-1)/n·S bytes sent by each rank, S for all chunks together. Depth n-1.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    for step in range(n - 1):
        mine = chunks[(rank - step - 1) % n]
        arriving = torch.empty_like(mine)
        send_recv(chunks[(rank - step) % n], (rank + 1) % n, arriving, (rank - 1) % n, group)
        mine += arriving
    return (rank + 1) % n


def ring_all_gather(chunks: list[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Give every rank all chunks, in place, where at first rank r holds the right chunk (r + 1) % n only.

    Cost: n-1 messages and (n-1)/n·S bytes sent by each rank, S for all chunks together. Depth n-1.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    for step in range(n - 1):
        send_recv(chunks[(rank + 1 - step) % n], (rank + 1) % n, chunks[(rank - step) % n], (rank - 1) % n, group)


@collective(writes="tensor", sums=True)
def false_ring_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """What is often published as the ring: the same steps and the same result, but whole tensors go round.

    Cost: 2(n-1) messages and 2(n-1)·S bytes sent by each rank, n times those of the ring. Depth 2(n-1).
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    total, arriving = tensor.clone(), torch.empty_like(tensor)
    for _ in range(n - 1):  # a sum travels round and takes up every rank's tensor
        send_recv(total, (rank + 1) % n, arriving, (rank - 1) % n, group)
        total, arriving = arriving.add_(tensor), total
    if rank == 0:
        tensor.copy_(total)
    for step in range(1, n):  # every rank has a sum now; rank 0's is kept, so that all get the same bits
        send_recv(total, (rank + 1) % n, arriving, (rank - 1) % n, group)
        total, arriving = arriving, total
        if step == rank:
            tensor.copy_(total)
    return tensor
