"""Parameters that stages on several ranks share, such as an embedding that is also the head."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.common.accounting import set_up
from scratch_ddp.common.replicas import complete_gradient
from scratch_ddp.pipeline.split import Layer

_TAG = 1 << 20  # of these messages, apart from those of a schedule


def shared(stages: Sequence[Sequence[Layer]], home: Mapping[int, int]) -> list[tuple[nn.Parameter, list[int]]]:
    """Return each parameter that several ranks hold, with these ranks in the order of their stages."""
    holders: dict[nn.Parameter, list[int]] = {}
    for stage, layers in enumerate(stages):
        for each in (each for layer in layers for module in layer.modules.values() for each in module.parameters()):
            ranks = holders.setdefault(each, [])
            if home[stage] not in ranks:
                ranks.append(home[stage])
    return [(parameter, ranks) for parameter, ranks in holders.items() if len(ranks) > 1]


class Tied:
    """This rank's parameters that others hold, too. Their values start as those of the first of these ranks."""

    def __init__(self, parameters: Sequence[tuple[nn.Parameter, list[int]]], group: dist.ProcessGroup | None):
        self.group, self.rank = group, dist.get_rank(group)
        self.mine = [(each, ranks) for each, ranks in parameters if self.rank in ranks]
        self._before: list[torch.Tensor | None] = []
        with set_up(), torch.no_grad():
            for parameter, ranks in self.mine:
                values = self._exchange(parameter, ranks)
                parameter.copy_(values[0])
        self.mine = [(each, ranks) for each, ranks in self.mine if each.requires_grad]

    def set_aside(self) -> None:
        """Before a step: take away the gradients of earlier steps, which are sums already."""
        self._before = [parameter.grad for parameter, _ in self.mine]
        for parameter, _ in self.mine:
            parameter.grad = None

    def add_up(self) -> None:
        """After a step: the sum over the ranks' gradients, in the same order on each, and those of earlier steps.

        Costs a message of the parameter's size to each other rank that holds it.
        """
        for (parameter, ranks), before in zip(self.mine, self._before, strict=True):
            gradients = self._exchange(complete_gradient(parameter), ranks)
            parameter.grad = sum(gradients[1:], start=gradients[0] if before is None else before + gradients[0])

    def _exchange(self, tensor: torch.Tensor, ranks: Sequence[int]) -> list[torch.Tensor]:
        """Every holder's tensor, in the order of `ranks`."""
        mine = tensor.detach().contiguous().cpu()
        every = {rank: mine if rank == self.rank else torch.empty_like(mine) for rank in ranks}
        others = [rank for rank in ranks if rank != self.rank]
        works = [dist.isend(mine, group=self.group, group_dst=rank, tag=_TAG) for rank in others]
        works += [dist.irecv(every[rank], group=self.group, group_src=rank, tag=_TAG) for rank in others]
        for work in works:
            work.wait()
        return [each.to(tensor.device) for each in every.values()]
