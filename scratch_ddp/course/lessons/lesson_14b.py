"""Lesson 14b, context and experts: a shift that gradients travel back through, and rows that go to chosen ranks."""

import torch
import torch.distributed as dist

from scratch_ddp.course.compare import Words
from scratch_ddp.course.exercise import Exercise


def shift(tensor, group=None):
    """Return what your left neighbour passed in. In backward, hand the gradient back.

    Rank r's left neighbour is rank r - 1 of `group`, rank 0's is the last.
    Cost: one message from each rank in forward, all at once, and so in backward.
    """
    # Autograd does not see what dist.send takes away. Who has the gradient in backward?
    rank, n = dist.get_rank(group), dist.get_world_size(group)

    def hand_on(mine, step):
        mine = mine.contiguous()
        arriving = torch.empty_like(mine)
        sending = dist.isend(mine, group=group, group_dst=(rank + step) % n)
        dist.recv(arriving, group=group, group_src=(rank - step) % n)
        sending.wait()
        return arriving

    class Shift(torch.autograd.Function):
        @staticmethod
        def forward(ctx, mine):
            return hand_on(mine, 1)

        @staticmethod
        def backward(ctx, gradient):
            return hand_on(gradient, -1)

    return Shift.apply(tensor)


def _tensors(at):
    yield "a vector", (torch.arange(4.0) + 10 * at.rank,)
    yield "a transposed matrix", ((torch.arange(6.0).view(2, 3) + 10 * at.rank).T,)


def _there_and_back(answer, tensor):
    leaf = tensor.clone().requires_grad_()
    shifted = answer(leaf)
    yield "value", "the result", shifted
    yield "untouched", "`tensor`", leaf
    shifted.backward(torch.full_like(leaf, dist.get_rank() + 1.0))
    ranks = range(dist.get_world_size())
    whose = [f"that of rank {rank}'s result" for rank in ranks if leaf.grad.eq(rank + 1).all()]
    yield "value", "the gradient of `tensor`", Words(*whose) if whose else leaf.grad


def send_rows(rows, counts, group=None):
    """Send the first counts[0] rows to rank 0, the next counts[1] to rank 1, and so on.

    Return what arrives: rank 0's rows first, then rank 1's. Counts may be 0.
    Cost: two all-to-alls, of one integer for each rank, and of the rows.
    """
    # dist.all_to_all_single needs to know how many rows come. Who knows it?
    leaving = torch.tensor(counts, device=rows.device)
    arriving = torch.empty_like(leaving)
    dist.all_to_all_single(arriving, leaving, group=group)
    received = arriving.tolist()
    result = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(result, rows.contiguous(), received, counts, group=group)
    return result


def _rows(at):
    for case, counts in {
        "rank r sends r + j rows to rank j": [at.rank + j for j in range(at.n)],
        "all to rank 0, which sends nothing": [at.rank] + [0] * (at.n - 1),
    }.items():
        yield case, (torch.arange(2.0 * sum(counts)).view(-1, 2) + 100 * at.rank, counts)


EXERCISES = (
    Exercise(shift, _tensors, use=_there_and_back),
    Exercise(send_rows, _rows),
)
