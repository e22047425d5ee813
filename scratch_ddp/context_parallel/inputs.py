"""What queries, keys and values must be before anything is sent."""

import torch


def inputs_problem(q: object, k: object, v: object) -> str | None:
    """Say why these can't be queries, keys and values of one attention, or return None."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.ndim != 4:
            return f"{name} must be a floating tensor (batch, heads, tokens, head size), not {show(tensor)}"
        if (tensor.shape, tensor.dtype, tensor.device) != (q.shape, q.dtype, q.device):
            return f"{name} is {show(tensor)}, but q is {show(q)}: repeat the heads of grouped queries first"
    return None if q.numel() else f"q is empty: {show(q)}"


def describe(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[str]:
    """What must be the same on every rank, also whether gradients will travel back."""
    trained = [torch.is_grad_enabled() and each.requires_grad for each in (q, k, v)]
    return [f"q, k and v: {q.dtype} {tuple(q.shape)}", f"requires_grad of q, k and v: {trained}"]


def show(tensor: object) -> str:
    """What a message says of an argument: dtype, shape and device, or its type."""
    if not isinstance(tensor, torch.Tensor):
        return type(tensor).__name__
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device}"
