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
    before its backward   gather      a hook on the gradients of its outputs
    after its backward    reduce      a hook on the gradients of its inputs

`scratch_ddp.fsdp.FSDP` is used in the same way, but leaves the mean in `.grad` after `model.sync_gradients()` only.
Left out, and done there: fetching the next unit while this one computes, ranks that take different paths, units of
which a part is frozen or unused, parameters of two units, outputs in classes of one's own, several dtypes, mixed
precision, accumulation, checkpoints, and nearly every check.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map_only

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
        if any(parameter.grad is None for parameter in self.parameters):
            raise RuntimeError("Only a part of a unit has gradients. scratch_ddp.fsdp.FSDP allows that.")
        gradients = self.flatten(parameter.grad for parameter in self.parameters) / self.n
        mine = torch.empty_like(self.shard)
        reduce_scatter(mine, gradients, group=self.group)
        self.shard.grad = mine if self.shard.grad is None else self.shard.grad + mine
        for parameter in self.parameters:
            parameter.grad = None


class FSDP(nn.Module):
    """A model of which one unit at a time is whole. The rest belongs to the root, gathered for a whole pass."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None = None, *, units: Iterable[nn.Module]):
        super().__init__()
        self.module = model
        of_units = {module: list(module.parameters()) for module in units}
        in_units = set().union(*of_units.values())
        if len(in_units) < sum(map(len, of_units.values())):
            raise ValueError("A parameter belongs to two units. scratch_ddp.fsdp.FSDP allows that.")
        rest = [parameter for parameter in model.parameters() if parameter not in in_units]
        shares = [(model, rest), *of_units.items()]  # the root is a unit too, the first
        self.units = [Unit(module, parameters, group) for module, parameters in shares if parameters]
        for unit in self.units:
            unit.module.register_forward_pre_hook(
                lambda _, args, kwargs, unit=unit: self.before_forward(unit, (args, kwargs)), with_kwargs=True
            )
            unit.module.register_forward_hook(lambda _, args, output, unit=unit: self.after_forward(unit, output))

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The shards."""
        return (unit.shard for unit in self.units)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def before_forward(self, unit: Unit, args: tuple) -> tuple:
        unit.free()  # what a forward without a backward has left may be from before a step
        unit.gather()
        args = tree_map_only(torch.Tensor, lambda each: each.view_as(each) if each.requires_grad else each, args)
        inputs = [each for each in tensors(args) if each.requires_grad]  # views: this unit's gradients alone
        if inputs:  # once the gradients of the inputs are known, the unit's own are
            register_multi_grad_hook(inputs, lambda _: self.after_backward(unit))
        return args

    def after_forward(self, unit: Unit, output: Any) -> None:
        backward = torch.is_grad_enabled()
        if not (backward and unit.module is self.module):  # the root stays whole until its backward
            unit.free()
        if backward and not tensors(output):
            raise TypeError("A unit must return tensors, alone or in tuples, lists or dicts.")
        for each in tensors(output):
            if each.requires_grad:
                each.register_hook(lambda _: self.before_backward(unit))

    def before_backward(self, unit: Unit) -> None:
        unit.gather()
        torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def after_backward(self, unit: Unit) -> None:
        if any(parameter.grad is not None for parameter in unit.parameters):
            unit.reduce_gradients()
        unit.free()

    def end_backward(self) -> None:
        """Called by autograd at the end: for the root, and for units whose inputs needed no gradient."""
        for unit in self.units:
            self.after_backward(unit)


def tensors(values: Any) -> list[torch.Tensor]:
    """The tensors in `values`, which may be nested tuples, lists and dicts."""
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
