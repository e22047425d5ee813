"""Which tokens of a sequence each rank holds. Row r of each result lists the positions of rank r, in order."""

import torch


def contiguous_positions(tokens: int, ranks: int) -> torch.Tensor:
    """Cut the sequence into one piece a rank: rank r holds the r-th.

    Returns int64 of shape (ranks, tokens / ranks). Under a causal mask the last rank then has the most to do. Raises
    ValueError unless `ranks` divides `tokens`.
    """
    _check(tokens, ranks, "ranks", ranks)
    return torch.arange(tokens).view(ranks, -1)


def zigzag_positions(tokens: int, ranks: int) -> torch.Tensor:
    """Cut the sequence into 2n pieces: rank r of n holds piece r from the start and piece r from the end.

    Returns int64 of shape (ranks, tokens / ranks). Under a causal mask all ranks then have equally much to do. Raises
    ValueError unless twice the number of ranks divides `tokens`.
    """
    _check(tokens, ranks, "pieces, two a rank", 2 * ranks)
    pieces = torch.arange(tokens).view(2 * ranks, -1)
    return torch.cat([pieces[:ranks], pieces[ranks:].flip(0)], 1)


def _check(tokens: int, ranks: int, what: str, pieces: int) -> None:
    if ranks < 1 or tokens < 1 or tokens % pieces:
        raise ValueError(f"{tokens} tokens can't be cut into {pieces} {what}: pass a multiple of {pieces}")
