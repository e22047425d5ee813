"""Lesson 02, inside all-reduce: a ring from send and receive; a broadcast and a reduce, which are the package's own."""

import torch
import torch.distributed as dist

from scratch_ddp.collectives import reduce, send_recv, tree_broadcast
from scratch_ddp.course.exercise import Exercise


def ring_all_reduce(tensor, group=None):
    """Sum `tensor` over the ranks, in place, and return it. All get the same bits.

    It may have any shape and dtype. Its n chunks differ by one element at most.
    Messages stay in `group`. Cost: each rank sends 2(n-1) messages of one chunk. Depth
    2(n-1). Memory: at most two of the largest chunks beside `tensor`.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    # Cut the tensor into n chunks. First each chunk's sum is to be complete on one
    # rank, then it goes to all. Which chunk does each rank send first?
    chunks = tensor.view(-1).tensor_split(n)
    buffer = torch.empty_like(chunks[0])  # the first chunks are the largest
    left, right = (rank - 1) % n, (rank + 1) % n
    for step in range(n - 1):  # reduce-scatter: a sum travels round and takes up every rank's part
        mine = chunks[(rank - step - 1) % n]
        send_recv(chunks[(rank - step) % n], right, buffer[: mine.numel()], left, group)
        mine += buffer[: mine.numel()]
    for step in range(n - 1):  # all-gather: the complete chunk travels round and every rank keeps it
        send_recv(chunks[(rank + 1 - step) % n], right, chunks[(rank - step) % n], left, group)
    # end of the answer
    return tensor


def _two_roots(at, name):
    for root in at.members[:2]:
        yield f"{name}={root}", (torch.arange(1000.0) + 10**at.rank, root)


def _sizes(at):
    for size in (4 * at.n, at.n - 1, 0):
        yield f"{size} element{'s' * (size != 1)}", (torch.arange(float(size)) + 10**at.rank,)
    yield "a matrix of float64", (torch.randn(at.n, 11, 109, dtype=torch.float64)[at.rank],)


_GIVEN = "from scratch_ddp.collectives import send_recv"
EXERCISES = (
    Exercise(tree_broadcast, lambda at: _two_roots(at, "src")),
    Exercise(reduce, lambda at: _two_roots(at, "dst"), room=lambda at, tensor, _: 2 * tensor.numel()),
    Exercise(ring_all_reduce, _sizes, close=1e-6, room=lambda at, tensor: 2 * -(-tensor.numel() // at.n), given=_GIVEN),
)
