"""What is checked before anything is sliced: a mistake on any rank is the same error on every rank."""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.common.agreement import check_everywhere, together
from scratch_ddp.common.replicas import broadcast_from_first, describe, model_problem, named_tensors

T = TypeVar("T")
_SLICED = {(nn.Linear, 0): "outputs", (nn.Linear, 1): "inputs", (nn.Embedding, 0): "rows of the vocabulary"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def prepare_everywhere(prepare: Callable[[], T], model: nn.Module, group: dist.ProcessGroup | None) -> T:
    """Give all ranks the first one's values in `model`, then call `prepare`, which changes and sends nothing.

    Returns what it returns. Raises ValueError on every rank if the models differ in more than their values, or if
    `prepare` raises on any. Costs two small all-reduces, and a broadcast of each tensor.
    """
    problem = model_problem(model, group)
    lines = [] if problem else describe(model)
    check_everywhere(problem, lines, "the ranks slice different models; do the same everywhere", group)
    for _, tensor in named_tensors(model):
        broadcast_from_first([tensor], group)
    with together(group):
        return prepare()


def check_plain(layer: type, plain: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Raise ValueError unless `layer` computes what `plain` does, and can be made of it on this rank."""
    kind, its = layer.made_of.__name__, type(plain).__name__
    if not isinstance(plain, layer.made_of):
        raise ValueError(f"{layer.__name__} is made of a torch.nn.{kind}, not of a {its}")
    own_forward = getattr(plain.forward, "__func__", None) is not layer.made_of.forward
    if own_forward or plain._modules or any(getattr(plain, hooks) for hooks in _HOOKS):
        raise ValueError(f"this {its} has a forward, hooks or modules of its own, which {layer.__name__} would lose")
    for option in ("sparse", "max_norm", "scale_grad_by_freq"):
        if getattr(plain, option, None):
            raise ValueError(f"an embedding with {option}={getattr(plain, option)!r} can't be sliced")
    for name, dim in layer.cuts.items():
        if getattr(plain, name, None) is not None:
            check_multiple(_SLICED[layer.made_of, dim], getattr(plain, name).shape[dim], group)


def check_multiple(what: str, count: int, group: dist.ProcessGroup | None) -> None:
    """Raise ValueError unless the ranks can hold equally many of `what`, such as "outputs"."""
    if count % (n := dist.get_world_size(group)):
        raise ValueError(
            f"the {count} {what} can't be shared evenly by {n} ranks: take a number of ranks that divides {count}"
        )


def own_ids(ids: torch.Tensor, rows: int, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids counted from the first of this rank's `rows`, and which of them are another rank's (then 0).

    Ids of no rank stay outside of the rows, so that every rank raises when it looks them up, as one process does.
    """
    here = ids - dist.get_rank(group) * rows
    others = ((here < 0) | (here >= rows)) & (ids >= 0) & (ids < dist.get_world_size(group) * rows)
    return here.masked_fill(others, 0), others
