"""Parameters that know that they are slices: a norm of their gradients is that of the whole gradient, on every rank.

So torch.nn.utils.clip_grad_norm_ is right by itself, under data parallelism too, and a GradScaler leaves a step out on
all ranks or on none.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

# As torch's DTensor enters itself there: optimizers and clipping then keep their fast paths.
from torch.optim.optimizer import _foreach_supported_types as _in_optimizers
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._foreach_utils import _foreach_supported_types as _in_clipping

from scratch_ddp.common.optimizer_steps import parameters_of
from scratch_ddp.tensor_parallel.moves import all_gather

_NORMS = (torch.linalg.vector_norm, torch.linalg.norm, torch.norm, torch.Tensor.norm)
_UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_


class SlicedGradient(torch.Tensor):
    """The gradient of a slice. Its norm is that of the whole gradient: an all-reduce, so every rank asks for it alike.

    Whatever else is computed with it is computed with this slice alone, and gives plain tensors.
    """

    sliced_over: dist.ProcessGroup | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
            if func is torch._foreach_norm:
                return _over_ranks(args[0], found, *args[1:2])
            if func in _NORMS and found.dim() == 0:
                given = (*args[1:2], kwargs.get("ord"), kwargs.get("p"))
                order = next((each for each in given if each not in (None, "fro")), 2)
                return _over_ranks(args[:1], [found], order)[0]
            if func is _UNSCALE:  # an inf in one rank's slice concerns all ranks
                group = next(each.sliced_over for each in args[0] if isinstance(each, cls))
                dist.all_reduce(args[1], dist.ReduceOp.MAX, group=group)
        return found


def _over_ranks(tensors: Sequence[torch.Tensor], norms: Sequence[torch.Tensor], p: float = 2) -> list[torch.Tensor]:
    """The norms of these tensors on this rank, with those of slices replaced by the norm over all ranks' slices."""
    places = [place for place, each in enumerate(tensors) if isinstance(each, SlicedGradient)]
    mine, norms, group = torch.stack([norms[place] for place in places]), list(norms), tensors[places[0]].sliced_over
    mine = mine.to(torch.promote_types(mine.dtype, torch.float32))
    if p == float("inf"):
        dist.all_reduce(mine, dist.ReduceOp.MAX, group=group)
    else:
        dist.all_reduce(mine.pow_(p), group=group)
        mine.pow_(1 / p)
    for place, norm in zip(places, mine, strict=True):
        norms[place] = norm.to(norms[place].dtype)
    return norms


class SlicedParameter(nn.Parameter):
    """This rank's slice of a parameter. `sliced_over`: the group whose ranks hold the slices; `sliced_dim`: along what.

    Computes as any parameter does. Whoever sets its gradient, reading it gives a `SlicedGradient`.
    """

    sliced_over: dist.ProcessGroup | None = None
    sliced_dim: int = 0

    def _gradient(self) -> torch.Tensor | None:
        gradient = torch.Tensor.grad.__get__(self)
        if type(gradient) is torch.Tensor:
            gradient.__class__ = SlicedGradient  # the same tensor, so that it can be changed in place
            gradient.sliced_over = self.sliced_over
        return gradient

    grad = property(_gradient, torch.Tensor.grad.__set__, torch.Tensor.grad.__delete__)


_in_optimizers.append(SlicedParameter)
_in_clipping.append(SlicedGradient)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    name = type(optimizer).__name__
    if name in ("Adafactor", "LBFGS", "Muon") and SlicedParameter in map(type, parameters_of(optimizer)):
        raise ValueError(f"{name} computes with whole matrices, and a rank has slices of them: take another optimizer")


register_optimizer_step_pre_hook(_before_step)


def keep_parameters(plain: nn.Module, layer: nn.Module) -> None:
    """Turn the plain module's parameters into the layer's slices, and give them to the layer in place of those."""
    for name, part in layer._parameters.items():
        if isinstance(part, SlicedParameter):
            layer._parameters[name] = whole = plain._parameters[name]
            mine = part.detach().clone(memory_format=torch.contiguous_format)
            whole.grad, whole.data = None, mine.new_empty(0, dtype=torch.complex64)  # so autograd forgets its shape
            whole.data = mine
            whole.__class__ = SlicedParameter
            vars(whole).update(vars(part))


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """torch.nn.utils.clip_grad_norm_ of the model's parameters. Every rank calls it, after `sync_gradients`.

    Costs one all-reduce of a number for each slice, in one message for each dtype.
    """
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type, foreach=True)


def gather_full_params(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters whole, on every rank, by name; tied ones under each of their names.

    The plain model's `load_state_dict` takes them. One all-gather for each sliced parameter.
    """
    return {name: _whole(each, each) for name, each in model.named_parameters(remove_duplicate=False)}


def gather_full_grads(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the gradients likewise, None where there is none."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: None if each.grad is None else _whole(each, each.grad) for name, each in named}


def _whole(parameter: nn.Parameter, values: torch.Tensor) -> torch.Tensor:
    if isinstance(parameter, SlicedParameter):
        return all_gather(values, parameter.sliced_over, parameter.sliced_dim)
    return values.detach().clone()
