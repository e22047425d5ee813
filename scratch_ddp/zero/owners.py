"""Which rank owns which parameter, and how updated parameters travel from their owners to all ranks.

Every parameter has one owner, and the ranks own about the same number of bytes.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from scratch_ddp.common.tensors import copy_back, flatten, group_alike

LARGE = 1 << 20  # bytes from which a tensor travels alone, without being copied


class Owners(dict[torch.Tensor, int]):
    """The owner of each parameter, among the ranks 0 to n - 1 of a group."""

    def __init__(self, world_size: int):
        super().__init__()
        self._loads = [0] * world_size  # bytes of trained parameters: frozen ones have no state

    def add(self, parameters: Sequence[torch.Tensor]) -> None:
        """Give each of some new parameters an owner; the old ones keep theirs."""
        sizes = [each.nbytes if each.requires_grad else 0 for each in parameters]
        self |= dict(zip(parameters, share_out(sizes, self._loads), strict=True))

    def shares_of(self, parameters: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Split parameters by their owners: one list for each rank of the group."""
        shares = [[] for _ in self._loads]
        for parameter in parameters:
            shares[self[parameter]].append(parameter)
        return shares


def share_out(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """Return for each item the rank that gets it: the largest first, each to the rank with the least so far.

    `loads` says what each rank has already, and is added to. The result depends on the arguments alone, so every rank
    computes the same. From equal loads no two ranks end further apart than the largest item: when a rank gets an item,
    it has the least. (Graham's rule, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17, 1969.)
    """
    owners = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        owners[item] = loads.index(min(loads))
        loads[owners[item]] += sizes[item]
    return owners


@torch.no_grad()
def broadcast_shares(shares: list[list[torch.Tensor]], group: dist.ProcessGroup | None = None) -> None:
    """Give every rank the values that rank r of the group has in the tensors of `shares[r]`, in place.

    Cost: a broadcast for each tensor of 1 MB or more, and for each rank and dtype one for all smaller ones. On a ring
    a rank sends (n - 1)/n of all bytes if the shares are equal. Memory while it runs: a copy of all small tensors.
    """
    under_way = []
    for owner, tensors in enumerate(shares):
        for message in split_into_messages(tensor.detach() for tensor in tensors):
            flat = flatten(message)
            under_way.append((dist.broadcast(flat, group=group, group_src=owner, async_op=True), flat, message))
    for work, flat, message in under_way:
        work.wait()
        copy_back(flat, message)


def split_into_messages(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Split what one rank sends into messages: each large contiguous tensor alone, small ones of a dtype together."""
    alone, together = [], []
    for tensor in tensors:
        if tensor.nbytes >= LARGE and tensor.is_contiguous():
            alone.append([tensor])
        elif tensor.numel():
            together.append(tensor)
    return [*alone, *group_alike(together)]
