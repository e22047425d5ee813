"""What stands in the `.grad` of a shard: between backward and `sync_gradients()` a placeholder, then rows of the mean.

Both are tensors that refuse what would be wrong without a word. The placeholder also notices `zero_grad()`, which has
to throw away gradients that are still whole, or on their way between the ranks.
"""

from typing import Any, Self

import torch
from torch import nn

NOT_SYNCHRONISED = "call sync_gradients() after backward, and before gradients are read, clipped or used in step()"
_T = torch.Tensor
_ZERO = {_T.zero_, torch._foreach_zero_}
# What zero_grad() and optimizers ask before they read values.
_ALLOWED = {
    *(getattr(_T, name).__get__ for name in ("shape", "dtype", "device", "layout", "is_sparse", "is_cuda", "is_cpu")),
    *(getattr(_T, name).__get__ for name in ("requires_grad", "grad_fn", "grad", "is_meta", "ndim")),
    *(_T.size, _T.dim, _T.numel, _T.detach_, _T.requires_grad_),
}
_NORMS = {torch.linalg.vector_norm, torch._foreach_norm}


class PendingGradient(torch.Tensor):
    """Stands for a gradient that is not synchronised yet. It has a shape and no memory, and raises when it is read.

    `earlier`: the synchronised gradient that the pending one will be added to. `is_cleared`: `zero_grad` was called.
    """

    parameter_name: str
    earlier: torch.Tensor | None
    is_cleared: bool

    @classmethod
    def of(cls, name: str, master: nn.Parameter) -> Self:
        """A placeholder for the gradient of `master`, the shard of the parameter `name`."""
        nothing = torch.zeros((), dtype=master.dtype, device=master.device).expand(master.shape)
        pending = nothing.as_subclass(cls)
        pending.parameter_name, pending.earlier, pending.is_cleared = name, master.grad, False
        return pending

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in _ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        pending = [each for each in _flat(args, kwargs) if isinstance(each, cls)]
        if func not in _ZERO:
            raise RuntimeError(f"the gradient of {pending[0].parameter_name!r} is not synchronised: {NOT_SYNCHRONISED}")
        for each in pending:
            each.is_cleared = True
        others = [each for each in _flat(args, kwargs) if isinstance(each, torch.Tensor) and not isinstance(each, cls)]
        for tensor in [*others, *(each.earlier for each in pending if each.earlier is not None)]:
            tensor.zero_()
        return args[0]

    def __repr__(self) -> str:
        return f"<gradient of {self.parameter_name!r}, not synchronised>"


class GradientRows(torch.Tensor):
    """This rank's rows of a gradient: an ordinary tensor that refuses to be clipped by the norm of these rows alone."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in _NORMS:
            raise RuntimeError(
                "a norm over the rows of this rank alone is not the gradients' norm, and would scale them differently "
                "on each rank: use clip_grad_norm_() of the FSDP in place of torch.nn.utils.clip_grad_norm_()"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _flat(args: tuple, kwargs: dict | None) -> list[Any]:
    values = []
    for value in [*args, *(kwargs or {}).values()]:
        values += value if isinstance(value, (list, tuple)) else [value]
    return values
