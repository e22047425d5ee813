"""Fully sharded data parallelism (ZeRO-3): a model that no rank ever holds whole.

Each rank keeps 1/n of every unit, a block of layers. Before a unit computes, all ranks' shards are gathered; afterwards
the gathered values are freed. In backward the unit is gathered once more, and its gradients are reduce-scattered, which
leaves each rank with the mean gradient of the 1/n that it owns. The optimizer sees shards only.

    model = FSDP(model, units=model.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)      # its state is 1/n too
    for batch in loader:
        model(batch).backward()                                     # leaves the mean in the shards' .grad
        optimizer.step()
        optimizer.zero_grad()

Four hooks say when a unit is needed:

    before its forward    gather      module.register_forward_pre_hook
    after its forward     free        module.register_forward_hook
    before its backward   gather      a hook on the gradient of its output
    after its backward    reduce      a hook on the gradients of its inputs

`scratch_ddp.fsdp.FSDP` is used in the same way, but leaves the mean in `.grad` after `model.sync_gradients()` only.
Left out, and done there: fetching the next unit while this one computes, ranks that take different paths, frozen and
tied parameters, several dtypes, mixed precision, accumulation, checkpoints, and every check.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the names since torch 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Unit:
    """Some parameters that are gathered and freed together, as one flat tensor: `whole`, of which `shard` is 1/n.

    The module's own parameters are views of `whole`. To free it, its storage is resized to nothing; the views, and
    what autograd has saved of them, stay valid and have their values again once the storage is filled again.
    """

    def __init__(self, module: nn.Module, parameters: list[nn.Parameter], group: dist.ProcessGroup | None):
        self.module, self.parameters, self.group = module, parameters, group
        self.rank, self.n = dist.get_rank(group), dist.get_world_size(group)
        self.sizes = [parameter.numel() for parameter in parameters]
        part = -(-sum(self.sizes) // self.n)  # rounded up, since all ranks must send the same amount
        self.gap = self.n * part - sum(self.sizes)
        self.whole = self.flatten(parameters)
        dist.broadcast(self.whole, group=group, group_src=0)  # all ranks start with rank 0's values
        self.shard = nn.Parameter(self.whole.view(self.n, part)[self.rank].clone())
        for parameter, view in zip(parameters, self.whole.split([*self.sizes, self.gap]), strict=False):
            parameter.data = view.view_as(parameter)
        self.free()

    def flatten(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        return nn.functional.pad(flat, (0, self.gap))

    def gather(self) -> None:
        """Give the parameters their values. One all-gather; a rank sends (n-1)/n of the unit's bytes."""
        storage = self.whole.untyped_storage()
        if not storage.size():
            storage.resize_(self.whole.nbytes)
            all_gather(self.whole, self.shard.detach(), group=self.group)

    def free(self) -> None:
        self.whole.untyped_storage().resize_(0)

    def reduce_gradients(self) -> None:
        """Leave this rank's part of the mean in `shard.grad`. One reduce-scatter, with as many bytes as `gather`."""
        gradients = self.flatten(parameter.grad for parameter in self.parameters) / self.n
        mine = torch.empty_like(self.shard)
        reduce_scatter(mine, gradients, group=self.group)
        self.shard.grad = mine if self.shard.grad is None else self.shard.grad + mine
        for parameter in self.parameters:
            parameter.grad = None

    def has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self.parameters)


class FSDP(nn.Module):
    """A model of which one unit at a time is whole. The rest belongs to the root, gathered for a whole pass."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None = None, *, units: Iterable[nn.Module]):
        super().__init__()
        self.units = [Unit(module, list(module.parameters()), group) for module in units]
        in_units = {parameter for unit in self.units for parameter in unit.parameters}
        rest = [parameter for parameter in model.parameters() if parameter not in in_units]
        self.root = Unit(model, rest, group)
        self.module = model
        for unit in self.units:
            unit.module.register_forward_pre_hook(lambda _, args, unit=unit: self.before_forward(unit, args))
            unit.module.register_forward_hook(lambda _, args, output, unit=unit: self.after_forward(unit, output))

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The shards."""
        return (unit.shard for unit in [self.root, *self.units])

    def forward(self, *args: Any) -> Any:
        self.root.gather()
        output = self.module(*args)
        if not torch.is_grad_enabled():  # no backward will free it
            self.root.free()
        return output

    def before_forward(self, unit: Unit, args: tuple) -> tuple:
        unit.gather()
        args = tuple(each.view_as(each) if each.requires_grad else each for each in args)
        inputs = [each for each in args if each.requires_grad]  # views: this unit's gradients alone
        if inputs:  # once the gradients of the inputs are known, the unit's own are
            register_multi_grad_hook(inputs, lambda _: self.after_backward(unit))
        return args

    def after_forward(self, unit: Unit, output: torch.Tensor) -> None:
        unit.free()
        if output.requires_grad:
            output.register_hook(lambda _: self.before_backward(unit))

    def before_backward(self, unit: Unit) -> None:
        unit.gather()
        torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def after_backward(self, unit: Unit) -> None:
        unit.reduce_gradients()
        unit.free()

    def end_backward(self) -> None:
        """Called by autograd at the end: for the root, and for a unit whose inputs needed no gradient."""
        for unit in [*self.units, self.root]:
            if unit.has_gradients():
                self.after_backward(unit)
