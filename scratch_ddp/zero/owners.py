"""Which rank owns which parameter: every parameter has one owner, and the ranks own about the same number of bytes."""

from collections.abc import Iterable, Iterator, Sequence

import torch


def share_out(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """Return for each item the rank that gets it: the largest first, each to the rank with the least so far.

    `loads` says what each rank has already, and is added to. Depends on nothing but its arguments, so every rank
    computes the same. From equal loads no two ranks end further apart than the largest item: when a rank gets an item,
    it has the least. (Graham's rule, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17, 1969.)
    """
    owners = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        owners[item] = loads.index(min(loads))
        loads[owners[item]] += sizes[item]
    return owners


class Owners:
    """The owner of each parameter, among the ranks 0 to n - 1 of a group.

    Frozen parameters have no optimizer state. They are shared out apart, so that they don't spoil the balance of the
    others, and so that they are balanced too should they be trained later.
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
