"""Which rank owns which parameter, and how updated parameters travel from their owners to all ranks.

Every parameter has one owner, and the ranks own about the same number of bytes.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

from scratch_ddp.common.tensors import copy_back, flatten, group_alike

LARGE = 1 << 20  # bytes from which a tensor travels alone, without being copied
IN_FLIGHT = 2  # messages that are under way while the next is prepared


class Owners:
    """The owner of each parameter, among the ranks 0 to n - 1 of a group.

    Frozen parameters have no optimizer state. They are shared out separately, so that they don't disturb the balance of
    the others, and are balanced themselves should they be trained later.
    """

    def __init__(self, world_size: int):
        self._of: dict[torch.Tensor, int] = {}
        self._loads = {trained: [0] * world_size for trained in (True, False)}  # bytes of parameters

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        """Give each of some new parameters an owner; the old ones keep theirs."""
        new = list(parameters)
        for trained, loads in self._loads.items():
            these = [parameter for parameter in new if parameter.requires_grad == trained]
            sizes = [parameter.numel() * parameter.element_size() for parameter in these]
            self._of.update(zip(these, share_out(sizes, loads), strict=True))

    def of(self, parameter: torch.Tensor) -> int:
        """The owner's rank in the group. KeyError if the parameter was never added."""
        return self._of[parameter]

    def shares_of(self, parameters: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Split parameters by their owners: one list for each rank of the group."""
        shares = [[] for _ in self._loads[True]]
        for parameter in parameters:
            shares[self.of(parameter)].append(parameter)
        return shares

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._of)


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
    a rank sends (n - 1)/n of all bytes if the shares are equal. Memory while it runs: a few messages of small tensors.
    """
    under_way: deque[tuple[dist.Work, torch.Tensor, list[torch.Tensor]]] = deque()
    for owner, tensors in enumerate(shares):
        for message in split_into_messages(tensor.detach() for tensor in tensors):
            flat = flatten(message)
            work = dist.broadcast(flat, group=group, group_src=owner, async_op=True)
            under_way.append((work, flat, message))
            if len(under_way) > IN_FLIGHT:
                _finish(*under_way.popleft())
    while under_way:
        _finish(*under_way.popleft())


def _finish(work: dist.Work, flat: torch.Tensor, message: list[torch.Tensor]) -> None:
    work.wait()
    copy_back(flat, message)


def split_into_messages(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Split what one rank sends into messages: each large contiguous tensor alone, small ones of a dtype together."""
    alone, together = [], []
    for tensor in tensors:
        if tensor.numel() * tensor.element_size() >= LARGE and tensor.is_contiguous():
            alone.append([tensor])
        elif tensor.numel():
            together.append(tensor)
    return [*alone, *group_alike(together)]
