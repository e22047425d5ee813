"""`move`: how a tensor gets from one layout over the ranks to another in forward, and its gradient back in backward.

A tensor is *whole* where every rank holds the same, a *slice* where each rank holds its part of a dimension, and
*partial* where the ranks' tensors have to be added up. Forward and backward are conjugate: where the tensor of a whole
input is used on every rank for something else, its gradients are partial and must be added up.

| move           | tensor, forward   | gradient, backward | used                                                     |
|----------------|-------------------|--------------------|----------------------------------------------------------|
| copy           | whole → whole     | partial → whole    | before a column-parallel layer ("f")                     |
| reduce         | partial → whole   | whole → whole      | after a row-parallel layer ("g")                         |
| gather         | slices → whole    | partial → slices   | f where tokens are sliced                                |
| reduce_scatter | partial → slices  | slices → whole     | g where tokens are sliced                                |
| join           | slices → whole    | whole → slices     | where every rank goes on with the same computation       |
| split          | whole → slices    | slices → whole     | the reverse                                              |
"""

from functools import partial

import torch
import torch.distributed as dist

from scratch_ddp.common.tensors import all_gather_single, conjugate, reduce_scatter_single


def move(tensor: torch.Tensor, name: str | None, group: dist.ProcessGroup | None = None, dim: int = -2) -> torch.Tensor:
    """Move a tensor as the table above says, by `name`; None leaves it as it is. Every rank of `group` calls it.

    `dim`: what slices are slices of, by default the tokens of a tensor (…, tokens, features).
    Costs what the table's arrows say, in forward and in backward: partial → whole one all-reduce, partial → slices one
    reduce-scatter, slices → whole one all-gather, each of the whole tensor's size; the others nothing.
    Raises ValueError, before anything is sent, for an unknown name or a dimension that can't be cut evenly.
    """
    if name is None:
        return tensor
    if name not in _PAIRS:
        raise ValueError(f"there is no move {name!r}; there are {', '.join(_PAIRS)}")
    forward, backward = (partial(each, group=group, dim=dim % tensor.dim()) for each in _PAIRS[name])
    return conjugate(tensor, forward, backward)


def _keep(tensor: torch.Tensor, group: dist.ProcessGroup | None, dim: int) -> torch.Tensor:
    return tensor.view_as(tensor)


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None, dim: int = 0) -> torch.Tensor:
    """Return the sum over the ranks. `tensor` stays as it is; `dim` plays no part."""
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def all_gather(tensor: torch.Tensor, group: dist.ProcessGroup | None, dim: int) -> torch.Tensor:
    """Return the ranks' slices joined along `dim`."""
    slices = tensor.new_empty(dist.get_world_size(group), *tensor.shape)
    all_gather_single(slices.view(-1), tensor.detach().contiguous().view(-1), group=group)
    return slices.movedim(0, dim).flatten(dim, dim + 1)


def _reduce_scatter(tensor: torch.Tensor, group: dist.ProcessGroup | None, dim: int) -> torch.Tensor:
    """Return this rank's slice, along `dim`, of the sum over the ranks."""
    slices = torch.stack(slices_of(tensor.detach(), group, dim))
    mine = torch.empty_like(slices[0])
    reduce_scatter_single(mine.view(-1), slices.view(-1), group=group)
    return mine


def _own_slice(tensor: torch.Tensor, group: dist.ProcessGroup | None, dim: int) -> torch.Tensor:
    return slices_of(tensor, group, dim)[dist.get_rank(group)].contiguous()


def slices_of(tensor: torch.Tensor, group: dist.ProcessGroup | None, dim: int) -> tuple[torch.Tensor, ...]:
    """Return views of each rank's slice along `dim`. Raises ValueError if they can't be of the same size."""
    n, shape = dist.get_world_size(group), tuple(tensor.shape)
    if shape[dim] % n:
        raise ValueError(f"dimension {dim} of a tensor of shape {shape} can't be cut evenly for {n} ranks")
    return tensor.chunk(n, dim) if n > 1 else (tensor,)


def own_ids(ids: torch.Tensor, rows: int, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids counted from the first of this rank's `rows`, and which of them are another rank's (then 0).

    Ids of no rank stay outside of the rows, so that every rank raises when it looks them up, as one process does.
    """
    here = ids - dist.get_rank(group) * rows
    others = ((here < 0) | (here >= rows)) & (ids >= 0) & (ids < dist.get_world_size(group) * rows)
    return here.masked_fill(others, 0), others


_PAIRS = {  # name: (forward, backward)
    "copy": (_keep, all_reduce),
    "reduce": (all_reduce, _keep),
    "gather": (all_gather, _reduce_scatter),
    "reduce_scatter": (_reduce_scatter, all_gather),
    "join": (all_gather, _own_slice),
    "split": (_own_slice, all_gather),
}
