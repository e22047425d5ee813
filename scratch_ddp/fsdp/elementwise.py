"""Optimizers that look at more than single elements are refused: on rows they would compute something else."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

ROWS, COLUMNS = 4, 3


def elementwise_problem(optimizer: torch.optim.Optimizer, shards: Iterable[nn.Parameter]) -> str | None:
    """Say why the optimizer can't work on shards, or return None. The same on every rank, without communication.

    It is tried out: two steps with the options of each group that holds any of the `shards`, on a small matrix and on
    its rows apart. An optimizer that can't be built from its options alone is taken on trust.
    """
    shards, name = set(shards), type(optimizer).__name__
    for group in optimizer.param_groups:
        if shards.isdisjoint(group["params"]):
            continue
        try:
            whole, apart = _try_out(optimizer, group, [ROWS]), _try_out(optimizer, group, [1, ROWS - 1])
        except _NotTried:
            return None
        except Exception as error:
            return f"{name} can't work on shards of parameters: on a small matrix and its rows it failed ({error})"
        if not torch.allclose(whole, apart, rtol=1e-6, atol=1e-9):
            return (
                f"{name} can't work on shards of parameters: its update of an element depends on others, some of which "
                "are on other ranks. Optimizers like SGD, Adam and AdamW can; with ShardedOptimizer, whose parameters "
                f"are whole, {name} can too"
            )
    return None


class _NotTried(Exception):
    """The optimizer can't be built here."""


def _try_out(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], rows: list[int]) -> torch.Tensor:
    """Return a matrix after two steps of such an optimizer that works on parts of it, with these numbers of rows."""
    device = group["params"][0].device
    values = torch.arange(1.0, ROWS * COLUMNS + 1, dtype=torch.float64, device=device).view(ROWS, COLUMNS)
    parts = [nn.Parameter(part) for part in (values / 7).sin().split(rows)]
    try:
        new = _like(optimizer, group, parts)
    except Exception as error:
        raise _NotTried from error
    for step in (1, 2):
        for part, gradient in zip(parts, (values * step).cos().split(rows), strict=True):
            part.grad = gradient.clone()
        new.step()
    return torch.cat([part.detach() for part in parts])


def _like(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parts: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """A new optimizer of the same class and options, with a learning rate that is not 0."""
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    if "lr" in options:
        options["lr"] = 0.1
    wanted = inspect.signature(type(optimizer).__init__).parameters
    required = {key: value for key, value in options.items() if key in wanted}
    required = {key: value for key, value in required.items() if wanted[key].default is inspect.Parameter.empty}
    return type(optimizer)([{**options, "params": parts}], **required)
