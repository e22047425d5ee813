"""The wrapped model as its ranks hold it: units, each gathered, freed and reduced as one, and what is not sharded.

ShardedModel            the whole model
    Unit                one module's parameters; the root's are those that belong to no other unit
        Shards          the unit's parameters of one dtype: gathered and freed with one message
        Gradients       their gradients: reduced with one message
    Replicated          parameters that every rank holds whole
    Buffers             the first rank's, on every rank
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.common.accounting import set_up
from scratch_ddp.common.agreement import gather_rows, message_device
from scratch_ddp.common.replicas import Buffers, RegisteredParameters, broadcast_from_first, named_tensors
from scratch_ddp.common.tensors import group_alike
from scratch_ddp.fsdp.comm import Ranks
from scratch_ddp.fsdp.gradients import Gradients, Replicated
from scratch_ddp.fsdp.meta_init import Init, initialise, replace_meta
from scratch_ddp.fsdp.plan import Plan
from scratch_ddp.fsdp.shards import Shards


class Unit:
    """A module with the parameters that belong to it alone, or the whole model with those that belong to no other unit.

    It has one `Shards` per dtype. Its methods call those of the same names of all its `Shards` or `Gradients`.
    """

    def __init__(self, name: str, module: nn.Module, shards: list[Shards]):
        self.name, self.module, self.shards = name, module, shards
        self.gradients = [Gradients(each) for each in shards]

    @property
    def is_gathered(self) -> bool:
        """True if the parameters have their values."""
        return all(shards.is_gathered for shards in self.shards)

    @property
    def needs_gather(self) -> bool:
        """True if parameters are neither gathered nor being gathered."""
        return any(shards.needs_gather for shards in self.shards)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The wrapped model's parameters that belong to the unit."""
        return itertools.chain.from_iterable(shards.parameters.values() for shards in self.shards)

    def gather(self) -> None:
        for shards in self.shards:
            shards.gather()

    def wait_for_gather(self) -> None:
        for shards in self.shards:
            shards.wait_for_gather()

    def free(self) -> None:
        for shards in self.shards:
            shards.free()

    def reduce(self) -> None:
        for gradients in self.gradients:
            gradients.reduce()

    @property
    def is_reduced(self) -> bool:
        return all(gradients.is_reduced for gradients in self.gradients)

    def wait_for_reduce(self) -> None:
        for gradients in self.gradients:
            gradients.wait_for_reduce()

    def keep_gradients(self) -> None:
        for gradients in self.gradients:
            gradients.keep()

    def mark_pending(self) -> None:
        for gradients in self.gradients:
            gradients.mark_pending()

    def abandon(self) -> None:
        """Free everything and drop all gradients, without waiting for a message that may never come."""
        for shards, gradients in zip(self.shards, self.gradients, strict=True):
            shards.abandon()
            gradients.drop()
            for master in shards.masters.values():
                master.grad = None


class SyncWork(NamedTuple):
    """What the ranks have to synchronise, since any of them has it."""

    unreduced: list[Gradients]  # with whole gradients
    present: set[str]  # masters that have had a gradient since the last step
    changed_buffers: list[int]  # a flag for each buffer: it may differ from the first rank's


class ShardedModel:
    """The units of a model, the root first, its replicated parameters and its buffers. No communication.

    Masters are the parameters that an optimizer works on: this rank's rows, and replicated parameters whole.
    """

    def __init__(self, module: nn.Module, ranks: Ranks, units: list[Unit], replicated: Replicated):
        self.module, self.ranks, self.units, self.replicated = module, ranks, units, replicated
        self.group = ranks.everyone
        self.shards = [shards for unit in units for shards in unit.shards]
        self.gradients = [gradients for unit in units for gradients in unit.gradients]
        self.buffers = Buffers(module, self.group)
        names = {parameter: name for name, parameter in module.named_parameters()}
        # Every name of a parameter, also where it is tied to another, and the first name of the same parameter.
        self.first_names = {name: names[each] for name, each in module.named_parameters(remove_duplicate=False)}
        self.flag_count = len(self.flags())
        self._registered = RegisteredParameters(module)
        self._changes_at_load = 0

    def masters(self) -> dict[str, nn.Parameter]:
        """The masters by their first names."""
        masters = dict(self.replicated.masters)
        for shards in self.shards:
            masters |= shards.masters
        return masters

    def adopt_changes(self) -> None:
        """Take over what the caller may change between passes."""
        for part in (*self.shards, *self.gradients):
            part.adopt_changes()

    def pending(self) -> dict[str, nn.Parameter]:
        """The masters whose gradients wait for `sync_gradients()`, by name."""
        found = self.replicated.pending()
        for gradients in self.gradients:
            found |= gradients.pending()
        return found

    def cleared(self) -> list[str]:
        """The sharded parameters whose gradients zero_grad() has cleared since backward."""
        return [name for gradients in self.gradients for name in gradients.cleared()]

    def drop_cleared(self) -> None:
        """Forget what zero_grad() has cleared since backward."""
        for gradients in self.gradients:
            gradients.drop_cleared()

    def problem(self) -> str | None:
        """Say what keeps this rank from a pass, or return None."""
        parts = [self._registered, self.buffers, *self.shards, *self.gradients, self.replicated]
        return next(filter(None, (part.problem() for part in parts)), None)

    def frozen(self) -> list[str]:
        """The names of the sharded parameters that are not trained."""
        return [name for shards in self.shards for name in shards.parameters if name not in shards.trained]

    def changes(self) -> int:
        """How many times masters were changed in place."""
        changes = sum(shards.part._version for shards in self.shards)
        return changes + sum(master._version for master in self.replicated.masters.values())

    def changes_since_load(self) -> int:
        return self.changes() - self._changes_at_load

    def mark_loaded(self) -> None:
        """Note that all ranks have loaded their masters, whatever happened to them before."""
        self._changes_at_load = self.changes()

    def flags(self) -> list[int]:
        """What this rank tells the others when they synchronise: `flag_count` numbers, 0 or 1 each."""
        present = set.union(self.replicated.present(), *(gradients.present() for gradients in self.gradients))
        unreduced = [gradients.are_unreduced() for gradients in self.gradients]
        return [*map(int, (*unreduced, *(name in present for name in self.masters()), *self.buffers.changed()))]

    def read_flags(self, flags: Iterable[int]) -> SyncWork:
        """Return what the ranks' flags mean together; each of `flags` is the largest of any rank."""
        flags = iter(flags)
        unreduced = list(itertools.compress(self.gradients, flags))  # takes as many flags as there are gradients
        return SyncWork(unreduced, set(itertools.compress(self.masters(), flags)), list(flags))


def shard_model(
    model: nn.Module,
    plan: Plan,
    ranks: Ranks,
    compute_dtype: torch.dtype | None,
    init: Init | None,
    device: torch.device | None,
) -> ShardedModel:
    """Leave each rank its rows of the first rank's values, one unit after the other, and the model's parameters freed.

    One broadcast per unit. What is on the meta device at the first rank is initialised by `init`, on every rank alike,
    one module at a time. Raises ValueError on every rank where values are missing.
    """
    group = ranks.everyone
    with set_up():
        on_meta = _on_meta_at_first_rank(model, group)
        replace_meta(model, device or message_device(group))
        unset = set(itertools.compress((tensor for _, tensor in named_tensors(model)), on_meta))
        named = dict(model.named_parameters())
        units = []
        for name, own in plan.parameters.items():
            shards = _shard({each: named[each] for each in own}, unset, ranks, compute_dtype)
            units.append(Unit(name, plan.modules[name], shards))
        initialise(model, unset, [shards for unit in units for shards in unit.shards], init, group)
        replicated = {name: named[name] for name in plan.replicated}
        broadcast_from_first([*replicated.values(), *model.buffers()], group)
    return ShardedModel(model, ranks, units, Replicated(replicated, group, compute_dtype))


def _on_meta_at_first_rank(model: nn.Module, group: dist.ProcessGroup | None) -> list[int]:
    """A flag for each parameter and buffer: the first rank has no values."""
    row = torch.tensor([tensor.is_meta for _, tensor in named_tensors(model)], dtype=torch.uint8)
    return gather_rows(row, group)[0].tolist() if row.numel() else []


def _shard(
    named: dict[str, nn.Parameter],
    unset: set[torch.Tensor],
    ranks: Ranks,
    compute_dtype: torch.dtype | None,
) -> list[Shards]:
    """Shard a unit's parameters, one `Shards` per dtype. Those that are not `unset` get the first rank's values."""
    names = {parameter: name for name, parameter in named.items()}
    sharded = []
    for alike in group_alike(named.values()):
        dtype = alike[0].dtype
        computed = compute_dtype if compute_dtype is not None and dtype.is_floating_point else dtype
        values = {names[each]: each.data for each in alike if each not in unset}
        shards = Shards({names[each]: each for each in alike}, ranks, computed)
        if values:
            shards.scatter_full(values if shards.rank == 0 else None)
        sharded.append(shards)
    return sharded
