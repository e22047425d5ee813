"""A pipeline's stage that only takes time, and a count of the activations that are alive."""

import weakref

import torch
from torch import nn

from scratch_ddp.instruments.network.clock import now, sleep_until, take_time


class LiveActivations:
    """How many of the tensors that forwards have saved for backward are in memory: `now`, and `most` so far.

    `with live:` around a forward. Parameters and views of them don't count.
    """

    def __init__(self) -> None:
        self.now = self.most = 0
        self._hooks: list[torch.autograd.graph.saved_tensors_hooks] = []

    def __enter__(self) -> "LiveActivations":
        self._hooks.append(torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor))
        self._hooks[-1].__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.pop().__exit__(*error)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter):
            self.now += 1
            self.most = max(self.most, self.now)
            weakref.finalize(tensor.untyped_storage(), self._freed)
        return tensor

    def _freed(self) -> None:
        self.now -= 1


class SleepingStage(nn.Module):
    """A small linear layer: sleeps `unit` seconds in forward, and as long for each half of its backward.

    Its input may be of any shape (…, width). It saves one activation a forward, which `live` counts.
    """

    def __init__(self, unit: float, width: int = 4, live: LiveActivations | None = None):
        super().__init__()
        self.unit, self.live = unit, live or LiveActivations()
        self.linear = nn.Linear(width, width, bias=False)
        self.linear.weight.register_hook(self._weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.live:
            return take_time(self.linear(x.clone()), forward=self.unit, backward=self.unit)

    def _weights(self, _: torch.Tensor) -> None:
        sleep_until(now() + self.unit)
