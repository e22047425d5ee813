"""Tensors that can travel together: of one dtype, on one device."""

from collections.abc import Iterable

import torch

MB = 2**20  # bytes


def group_alike(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Split tensors into groups of one dtype and device, which can share a message. Order is kept, also of groups."""
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())
