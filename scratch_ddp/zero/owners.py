"""Which rank owns which parameter: every parameter has one owner, and the ranks own about the same number of bytes."""

from collections.abc import Iterable, Sequence

import torch


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
