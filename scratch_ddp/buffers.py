"""Buffers of replicas, such as BatchNorm's statistics, kept equal: the first rank's values win."""

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.agreement import message_device
from scratch_ddp.replicas import broadcast_from_first, buffers_of


class Buffers:
    """Remembers a model's buffers, to see which have changed since the ranks were last equal."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None):
        self.model, self.group = model, group
        self.remember()

    def remember(self) -> None:
        """Take the values that the buffers have now for those of all ranks."""
        self._last = [buffer.detach().clone() for buffer in buffers_of(self.model)]

    def problem(self) -> str | None:
        """Say whether the buffers are no longer those that were remembered, or return None."""
        if [buffer.shape for buffer in buffers_of(self.model)] != [buffer.shape for buffer in self._last]:
            return "buffers were added, removed or resized after the model was wrapped: wrap it again"
        return None

    def changed(self) -> list[bool]:
        """Say for each buffer whether it has changed on this rank."""
        pairs = zip(buffers_of(self.model), self._last, strict=True)
        different = [(now != before.to(now)).any().to(message_device(self.group)) for now, before in pairs]
        return torch.stack(different).tolist() if different else []

    def copy_from_first(self, which: Sequence[int]) -> None:
        """Give every rank the first rank's values of the buffers that are marked. One broadcast a dtype, if any is."""
        if any(which):
            broadcast_from_first(itertools.compress(buffers_of(self.model), which), self.group)
            self.remember()
