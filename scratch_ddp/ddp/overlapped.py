"""Data parallelism that hides communication behind backward: one all-reduce per parameter, from its hook."""

import torch
from torch import nn

from scratch_ddp.common.replicas import complete_gradient
from scratch_ddp.ddp.reducer import HookedModule


class OverlappedDDP(HookedModule):
    """A model that starts as the first rank's on every rank, each gradient averaged while backward goes on.

    `group` as for `ReplicatedModule`, which also says what is checked; `HookedModule` says what happens to gradients.
    Costs one broadcast per dtype when it is built. Each step costs one asynchronous all-reduce per parameter that was
    not frozen when the model was wrapped (of zeros for one without a gradient), started in the reverse order of
    registration, and one small exchange of which parameters have a gradient. Gradients travel in their own memory.
    """

    def make_buckets(self, parameters: list[nn.Parameter]) -> list["OneGradient"]:
        """A bucket for each parameter."""
        return [OneGradient(parameter) for parameter in parameters]


class OneGradient:
    """A bucket of one gradient, reduced in the memory where autograd has put it."""

    def __init__(self, parameter: nn.Parameter):
        self.parameters = [parameter]
        self._like = torch.empty_like(parameter, device="meta")  # as the parameter is now, also if it changes later
        self._device = parameter.device
        self.tensor: torch.Tensor | None = None

    def put(self, parameter: nn.Parameter, world_size: int) -> None:
        self.tensor = complete_gradient(parameter)
        self.tensor /= world_size

    def put_zeros(self, parameter: nn.Parameter) -> None:
        self.tensor = torch.zeros_like(self._like, device=self._device)

    def mean(self, parameter: nn.Parameter) -> torch.Tensor:
        mean, self.tensor = self.tensor, None  # zero_grad() then frees it
        return mean
