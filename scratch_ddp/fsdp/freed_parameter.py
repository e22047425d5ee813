"""A parameter whose values are not in memory. Reading it raises an error; otherwise it would crash the process.

The parameter remains the same object, so that ties, hooks and autograd's graph keep hold of it. Only its class changes,
and the size of the memory behind it.
"""

from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

_NAME = "_sharded_under_the_name"
_CLASS = "_class_with_values"
_T = torch.Tensor
# What can be told without the values. Not `is_leaf`: optimizers ask for it, and must not be made from such a parameter.
_ALLOWED = {
    *(getattr(_T, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "is_meta", "nbytes")),
    *(getattr(_T, name).__get__ for name in ("requires_grad", "grad", "is_cuda", "is_cpu", "itemsize")),
    *(getattr(_T, name).__set__ for name in ("requires_grad", "grad")),
    *(_T.size, _T.dim, _T.ndimension, _T.numel, _T.nelement, _T.element_size, _T.stride, _T.is_contiguous, _T.__len__),
    *(_T.is_floating_point, _T.is_complex, _T.requires_grad_, _T.register_hook),
    _T.register_post_accumulate_grad_hook,
}


class FreedParameter(nn.Parameter):
    """A parameter while it is freed: it has a shape and a dtype, and no values."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in _ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = next(name_of(each) for each in _tensors([*args, *(kwargs or {}).values()]) if isinstance(each, cls))
        raise RuntimeError(_is_freed(name))

    def __repr__(self) -> str:
        return f"<{_is_freed(name_of(self))}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(_is_freed(name_of(self)))


def _is_freed(name: str) -> str:
    return (
        f"parameter {name!r} is freed: its values are gathered only while its unit computes. Call the wrapped model or "
        "a whole unit, read values from gather_full_params(), save with full_state_dict() or save(), move or convert a "
        "model before it is wrapped, and make optimizers from the parameters() of the FSDP, which are the shards. "
        "Where an FSDP is part of another module, wrap the outermost one instead: FSDP(outer)"
    )


def _tensors(values: Any) -> Any:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _tensors(value)
        else:
            yield value


def name_of(parameter: nn.Parameter) -> str | None:
    """The name under which a parameter was sharded, or None if it was not."""
    return getattr(parameter, _NAME, None)


def mark_sharded(parameter: nn.Parameter, name: str) -> None:
    """Remember that a parameter is sharded, under which name, and which class it has while it has values."""
    if name_of(parameter) is not None:
        allow_reading(parameter)
    setattr(parameter, _NAME, name)
    setattr(parameter, _CLASS, type(parameter))


def unmark(parameter: nn.Parameter) -> None:
    """Make it an ordinary parameter again."""
    allow_reading(parameter)
    delattr(parameter, _NAME)
    delattr(parameter, _CLASS)


def refuse_reading(parameter: nn.Parameter) -> None:
    """From now on the parameter raises when its values are read. Autograd, in C++, is not stopped by it."""
    parameter.__class__ = FreedParameter


def allow_reading(parameter: nn.Parameter) -> None:
    """Undo `refuse_reading`: the parameter has its values."""
    parameter.__class__ = getattr(parameter, _CLASS)


def _refuse_whole_parameters(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (name := name_of(parameter)) is not None:
                raise ValueError(
                    f"the optimizer was made from the whole parameter {name!r}, which has no values and no "
                    "gradient between passes: make it from the parameters() of the FSDP, after wrapping the model"
                )


register_optimizer_step_pre_hook(_refuse_whole_parameters)
