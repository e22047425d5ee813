"""Data parallelism that hides messages behind backward: an all-reduce a parameter, as soon as its gradient is there."""

import torch
from torch import nn

from scratch_ddp.common.replicas import complete_gradient
from scratch_ddp.ddp.reducer import HookedModule


class OverlappedDDP(HookedModule):
    """A model that starts as the first rank's on every rank, each gradient averaged while backward goes on.

    `group` as for `ReplicatedModule`, which also says what is checked; `HookedModule` says what happens to gradients.
    Costs one broadcast a dtype when it is built, and at each step one asynchronous all-reduce a parameter that was not
    frozen when the model was wrapped (zeros travel for one without a gradient), started in the reverse order of
    registration, beside one small exchange of which parameters have a gradient. No buffers: they travel as they are.
    """

    def make_messages(self, parameters: list[nn.Parameter]) -> list["OneGradient"]:
        """A message for each parameter."""
        return [OneGradient(parameter) for parameter in parameters]


class OneGradient:
    """A message of one gradient, reduced where autograd has put it."""

    def __init__(self, parameter: nn.Parameter):
        self.parameters = [parameter]
        self._like = torch.empty_like(parameter, device="meta")  # as it is now, whatever becomes of it
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
