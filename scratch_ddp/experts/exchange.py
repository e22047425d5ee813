"""Rows to their ranks: an all-to-all whose pieces have any size."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from scratch_ddp.common.conjugate import conjugate


def exchange_rows(
    rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Send the first `sent[0]` rows to rank 0, the next `sent[1]` to rank 1, …; return what arrives, rank by rank.

    `rows`: (sum(sent), …); `received[j]`: how many rows come from rank j, 0 included. Returns (sum(received), …).
    Gradients travel back the same way. Nothing is checked, and every rank must run the backward. Cost: one all-to-all
    of the bytes of `rows` in forward, and one of the bytes of the result in backward.
    """
    return conjugate(rows, partial(_exchange, sent, received, group), partial(_exchange, received, sent, group))


def _exchange(
    sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None, rows: torch.Tensor
) -> torch.Tensor:
    arriving = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arriving, rows.contiguous(), list(received), list(sent), group=group)
    return arriving
