"""Where the model calls the runtime: before and after the forward of a module of units, and in its backward."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from scratch_ddp.fsdp.passes import Runtime, Turn
from scratch_ddp.fsdp.unit import ROOT


def install_hooks(runtime: Runtime, modules: Mapping[str, nn.Module], compute_dtype: torch.dtype | None) -> None:
    """Let the model call the runtime:

        the whole model      begin_forward, end_forward
        a module of units    before_forward, after_forward
        outputs of either    before_backward, once the gradient of one of them is known
        a module's inputs    after_backward, once the gradients of all of them are known

    A module none of whose inputs needs a gradient is done only when the whole backward pass is over. torch.compile
    leaves the hooks out of its graphs.
    """
    for name, module in modules.items():
        if name not in runtime.turns:
            continue  # all of its parameters are tied, and belong to the root
        before, after = _hooks(runtime, runtime.turns[name], name == ROOT, compute_dtype)
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        # After an exception in the model, its forward is ended as well: other ranks may have had none.
        module.register_forward_hook(after, always_call=name == ROOT)


def _hooks(runtime: Runtime, turn: Turn, is_root: bool, compute_dtype: torch.dtype | None) -> tuple[Callable, Callable]:
    """The hooks before and after a module's forward."""

    @torch.compiler.disable(reason="FSDP gathers parameters here")
    def before(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        runtime.begin_forward() if is_root else runtime.before_forward(turn)
        watched: list[torch.Tensor] = []

        def prepare(tensor: torch.Tensor) -> torch.Tensor:
            if compute_dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(compute_dtype)
            if is_root or not (tensor.requires_grad and torch.is_grad_enabled()):
                return tensor
            # A view: of a tensor that other modules use too, only this one's part of the gradient is waited for.
            watched.append(tensor.view_as(tensor))
            return watched[-1]

        args, kwargs = _map_tensors((args, kwargs), prepare)
        if watched:
            register_multi_grad_hook(watched, lambda _: runtime.after_backward(turn))
        return args, kwargs

    @torch.compiler.disable(reason="FSDP frees parameters here")
    def after(module: nn.Module, args: tuple, output: Any) -> None:
        restarts, has_backward = runtime.restarts, False
        for tensor in _tensors(output, set()):
            if tensor.requires_grad:
                has_backward = True
                tensor.register_hook(lambda _: runtime.before_backward(turn, restarts))
        runtime.end_forward() if is_root else runtime.after_forward(turn, has_backward)

    return before, after


def _map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the same nest of tuples, lists and dicts, its tensors changed.

    Other objects remain the same: a cache that the model writes to must stay the caller's own.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_map_tensors(each, change) for each in value)
    if type(value) is dict:
        return {key: _map_tensors(each, change) for key, each in value.items()}
    return value


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """All tensors in an output, however nested: also in the attributes of objects that torch's pytree does not know."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif id(leaf) not in seen and not isinstance(leaf, (nn.Module, type)):
            seen.add(id(leaf))
            slots = [name for kind in type(leaf).__mro__ for name in getattr(kind, "__slots__", ())]
            attributes = [getattr(leaf, name, None) for name in slots if isinstance(name, str)]
            yield from _tensors([*getattr(leaf, "__dict__", {}).values(), *attributes], seen)
