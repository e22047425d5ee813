"""A unit: parameters that are gathered, freed and reduced with one message each, and what a rank holds of them.

gather         start the all-gather of every rank's rows
wait           wait for it: the modules now hold the whole parameters
free           give their memory back: the modules hold this rank's rows again, DTensors under the same names
reduce         start to average the whole gradients that backward has left, and drop them
finish_reduce  wait for it: this rank's rows of the mean are kept
keep           under `no_sync`: keep the whole gradients in the parameters' own dtype instead
hand_out       the mean becomes the `.grad` of the shards
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.common.replicas import gradient_problem
from scratch_ddp.fsdp.comm import Ranks, Started

ROOT = ""  # the name of the whole model, as in named_modules()
Place = tuple[nn.Module, str]  # a module, and the name under which it holds a parameter


@dataclass(frozen=True)
class Rows:
    """One parameter, cut on dim 0: rank r has rows r·chunk to (r+1)·chunk, the last ranks fewer or none.

    torch.chunk, fully_shard and DTensor's Shard(0) cut in the same way. A scalar counts as one row of one element.
    Ranks may hold different numbers of rows, but their parts of a message have one size: gaps fill them up.
    """

    shape: torch.Size  # of the whole parameter
    offset: int  # where the parameter begins in each rank's part of a message, in elements
    chunk: int  # rows per rank: ⌈rows / n⌉

    @property
    def size(self) -> int:
        """Elements that the parameter takes in each rank's part of a message, gaps included."""
        return self.chunk * self.shape[1:].numel()

    def of_part(self, part: torch.Tensor, rank: int) -> torch.Tensor:
        """The rank's rows, a view of its part of a message: shape (rows, …), other dimensions as the parameter's."""
        count = max(0, min(self.chunk, (self.shape or (1,))[0] - rank * self.chunk))
        return part[self.offset : self.offset + self.size].view(self.chunk, *self.shape[1:])[:count]

    def write(self, message: torch.Tensor, whole: torch.Tensor | None, scale: float = 1) -> None:
        """Put a whole tensor's rows, times `scale`, into a message of shape (n, part), and zeros into the gaps."""
        place = message[:, self.offset : self.offset + self.size]
        full = whole.numel() // self.size if whole is not None and self.size else 0  # ranks that have all their rows
        if full:
            torch.mul(whole.reshape(-1)[: full * self.size].view(full, self.size), scale, out=place[:full])
        if full < len(place):
            place[full:].zero_()
            rest = whole.reshape(-1)[full * self.size :] if whole is not None else ()
            if len(rest):
                torch.mul(rest, scale, out=place[full, : len(rest)])


def lay_out(shapes: Iterable[torch.Size], count: int) -> list[Rows]:
    """Return where each parameter's rows lie in the parts of a message between `count` ranks."""
    laid_out, offset = [], 0
    for shape in shapes:
        laid_out.append(Rows(shape, offset, -(-(shape[0] if shape else 1) // count)))
        offset += laid_out[-1].size
    return laid_out


class OnItsWay(torch.Tensor):
    """What stands in a shard's `.grad` from backward to `sync_gradients()`: nobody can compute with it.

    So it is noticed if `zero_grad()` clears it: the gradient that it stands for is thrown away.
    """

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> NoReturn:
        raise ValueError("a gradient is on its way between backward and sync_gradients(): use it after that")


class Unit:
    """Parameters that belong to one module alone, or of the root, that belong to no other module.

    They have one dtype, and all of them are trained or frozen at first. `names`: theirs in the model. `places`: which
    modules hold each of them.
    `flat` is what this rank keeps: its rows of all of them, in their own dtype. `shards`, the parameters between
    passes, are DTensors on its memory. `wholes`, the parameters while they are gathered, are views of one storage,
    which has memory only then: as it is always the same one, what autograd has saved of them has its values back in
    backward. Wholes and messages have `compute_dtype`. Starts freed, with rows of zeros.
    """

    def __init__(
        self,
        module_name: str,
        named: Mapping[str, nn.Parameter],
        places: list[list[Place]],
        ranks: Ranks,
        compute_dtype: torch.dtype | None,
    ):
        first = next(iter(named.values()))
        self.module_name, self.names, self.places, self.ranks = module_name, list(named), places, ranks
        self.dtype = self.compute_dtype = first.dtype
        if compute_dtype is not None and first.is_floating_point():
            self.compute_dtype = compute_dtype
        self.rows = lay_out([each.shape for each in named.values()], ranks.count)
        self._sizes = [rows.size for rows in self.rows]
        self.flat = torch.zeros(sum(self._sizes), dtype=self.dtype, device=first.device)
        trained = [each.requires_grad for each in named.values()]
        rows = [self._as_dtensor(each, each.of_part(self.flat, ranks.rank)) for each in self.rows]
        self.shards = [nn.Parameter(each, requires_grad) for each, requires_grad in zip(rows, trained, strict=True)]
        memory = self.flat.new_empty(ranks.count * len(self.flat), dtype=self.compute_dtype)
        self._storage, self._nbytes = memory.untyped_storage(), memory.nbytes
        padded = memory.split([ranks.count * size for size in self._sizes])  # gaps after the last rank's rows
        self._columns = [each.view(ranks.count, size) for each, size in zip(padded, self._sizes, strict=True)]
        self.wholes = [nn.Parameter(each.new_empty(0), requires_grad=False) for each in padded]
        for whole, rows, each in zip(self.wholes, self.rows, padded, strict=True):
            whole.data = each[: rows.shape.numel()].view(rows.shape)  # with a version of its own: filling is no change
        self._gathering: Started | None = None
        self._kept: dict[int, torch.Tensor] = {}  # whole gradients of micro-batches that were not synchronised
        self._earlier: dict[int, torch.Tensor | None] = {}  # what was in `.grad` before a gradient was on its way
        self._reducing: Started | None = None
        self._mean: torch.Tensor | None = None  # this rank's rows of the mean, flat
        self._seen: set[int] = set()  # the parameters that have had a gradient here since the last `hand_out`
        self._refused: str | None = None  # which gradient can't be averaged, and why
        self.is_gathered = True
        self.free()
        self.adopt_trained()

    def adopt_trained(self) -> None:
        """Train from now on what the caller wants trained: `requires_grad` of the shards."""
        for shard, whole in zip(self.shards, self.wholes, strict=True):
            whole.requires_grad = shard.requires_grad

    @property
    def is_trained(self) -> bool:
        return any(whole.requires_grad for whole in self.wholes)

    @property
    def frozen(self) -> list[str]:
        """The parameters that are not trained."""
        return [name for name, whole in zip(self.names, self.wholes, strict=True) if not whole.requires_grad]

    # Parameters

    @property
    def is_available(self) -> bool:
        """Whether the parameters are gathered, or on their way."""
        return self.is_gathered or self._gathering is not None or not len(self.flat)

    def gather(self) -> None:
        """Start the all-gather. Every rank does, also one that has them: it takes part."""
        self._drop_message()
        if len(self.flat):
            self._gathering = self.ranks.all_gather(self.flat.to(self.compute_dtype))

    def wait(self) -> None:
        """Wait until the parameters have their values, and hand them to the modules."""
        if self._gathering is not None:
            message, self._gathering = self._gathering.wait(), None
            self._storage.resize_(self._nbytes)
            torch.split_with_sizes_copy(message, self._sizes, dim=1, out=self._columns)
        if not self.is_gathered:
            self._hold(self.wholes)

    def free(self) -> None:
        """Give the memory of the whole parameters back, and that of a message that nobody has used."""
        self._drop_message()
        if self.is_gathered:
            self._storage.resize_(0)
            self._hold(self.shards)

    def abandon(self) -> None:
        """Free, and forget all gradients, without waiting for a message that may never come."""
        self._gathering = self._reducing = self._mean = self._refused = None
        for memory in (self._kept, self._earlier, self._seen):
            memory.clear()
        for parameter in (*self.wholes, *self.shards):
            parameter.grad = None
        self.free()

    def set_rows(self, wholes: Mapping[str, torch.Tensor] | None) -> None:
        """Take this rank's rows of the first rank's whole tensors, by name; others may pass None. One broadcast."""
        if len(self.flat):
            message = self.flat.new_empty(self.ranks.count, len(self.flat))
            for name, rows in zip(self.names, self.rows, strict=True):
                rows.write(message, None if wholes is None else wholes[name].detach())
            dist.broadcast(message, group=self.ranks.everyone, group_src=0)
            self.flat.copy_(message[self.ranks.rank])

    def problem(self) -> str | None:
        """Say what keeps the parameters from being gathered, or return None."""
        memory = self.flat.untyped_storage().data_ptr()
        for name, places, shard, whole in zip(self.names, self.places, self.shards, self.wholes, strict=True):
            held = whole if self.is_gathered else shard
            if any(module._parameters.get(attribute) is not held for module, attribute in places):
                return f"parameter {name!r} was replaced or removed after the model was wrapped: wrap the model again"
            if shard._local_tensor.untyped_storage().data_ptr() != memory or shard.dtype != self.dtype:
                return f"the values of {name!r} were replaced after the model was wrapped: move or convert it before"
            if whole._version:
                return f"the model writes to its parameter {name!r}, but what it writes is gone when it is freed"
            if shard._backward_hooks or shard._post_accumulate_grad_hooks:
                return f"a hook on {name!r} is never called, since a shard gets its gradient from sync_gradients()"
        return None

    def _hold(self, parameters: list[nn.Parameter]) -> None:
        """Let the modules hold these parameters."""
        self.is_gathered = parameters is self.wholes
        for places, parameter in zip(self.places, parameters, strict=True):
            for module, name in places:
                if type(module).__setattr__ is nn.Module.__setattr__:
                    module._parameters[name] = parameter
                else:  # nn.LSTM keeps a list of its parameters up to date
                    setattr(module, name, parameter)

    def _drop_message(self) -> None:
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def _as_dtensor(self, rows: Rows, mine: torch.Tensor) -> torch.Tensor:
        return self.ranks.dtensor(mine, rows.shape or (1,))

    # Gradients

    def reduce(self) -> None:
        """Start to average the whole gradients over all ranks, and drop them; zeros where there is none."""
        self.finish_reduce()
        message = self.flat.new_empty(self.ranks.count, len(self.flat), dtype=self.compute_dtype)
        for index, rows in enumerate(self.rows):  # divided before the sum, which could overflow in half precision
            rows.write(message, self._take(index), 1 / (self.ranks.count * self.ranks.copies))
        self._reducing = self.ranks.reduce_scatter(message)

    def finish_reduce(self) -> None:
        """Wait for the reduction, if one has been started, and add its result to the mean."""
        if self._reducing is not None:
            mean, self._reducing = self._reducing.wait().to(self.dtype), None
            self._mean = mean if self._mean is None else self._mean.add_(mean)

    def reduce_over_copies(self) -> None:
        """Where the model has several copies, start to add up their means; `finish_reduce` waits for it."""
        if self._mean is not None and self.ranks.copies > 1:
            mean, self._mean = self._mean.to(self.compute_dtype), None
            self._reducing = self.ranks.all_reduce_over_copies(mean)

    def mark(self) -> None:
        """At the end of backward: let gradients be on their way, also where only other ranks may have one."""
        for index, (shard, whole) in enumerate(zip(self.shards, self.wholes, strict=True)):
            if whole.requires_grad and not isinstance(shard.grad, OnItsWay):
                self._earlier[index] = shard.grad
                nothing = torch.zeros((), dtype=shard.dtype, device=shard.device)
                shard.grad = nothing.expand(shard.shape).as_subclass(OnItsWay)

    def hand_out(self, present: Iterable[bool]) -> None:
        """Add the mean to the `.grad` of each shard whose parameter is `present`: had a gradient on any rank."""
        for index, is_present in enumerate(present):
            shard, rows = self.shards[index], self.rows[index]
            if index in self._earlier:
                shard.grad = self._earlier.pop(index)
            if is_present and self._mean is not None:
                mean = self._as_dtensor(rows, rows.of_part(self._mean, self.ranks.rank))
                shard.grad = mean if shard.grad is None else shard.grad.add_(mean)
        self._mean = None
        self._seen.clear()

    def keep(self) -> None:
        """Keep whole gradients for later in the parameters' own dtype: a sum in half precision would lose too much."""
        for index in range(len(self.wholes)):
            gradient = self._take_gradient(index)
            if gradient is not None:
                kept = self._kept.get(index)
                self._kept[index] = gradient.to(self.dtype) if kept is None else kept.add_(gradient)

    def cleared(self) -> list[str]:
        """The parameters whose gradients `zero_grad` has thrown away since backward."""
        return [self.names[index] for index in self._earlier if not isinstance(self.shards[index].grad, OnItsWay)]

    def drop_cleared(self) -> None:
        """Forget them."""
        cleared = self.cleared()
        if cleared:
            self.finish_reduce()
        for index in map(self.names.index, cleared):
            self._take(index)
            self._seen.discard(index)
            del self._earlier[index]
            if self._mean is not None:
                self.rows[index].of_part(self._mean, self.ranks.rank).zero_()

    def gradient_problem(self) -> str | None:
        """Say which gradient can't be averaged, or return None."""
        for index, whole in enumerate(self.wholes):
            if whole.grad is not None:
                self._refuses(index, whole.grad)
        return self._refused

    @property
    def on_their_way(self) -> list[nn.Parameter]:
        """The shards whose gradients wait for `sync_gradients()`."""
        return [self.shards[index] for index in self._earlier if isinstance(self.shards[index].grad, OnItsWay)]

    @property
    def is_unreduced(self) -> bool:
        """Whether there are whole gradients."""
        return bool(self._kept) or any(whole.grad is not None for whole in self.wholes)

    def present(self) -> list[bool]:
        """For each parameter: whether it has had a gradient here since the last `hand_out`."""
        return [
            index in self._seen or index in self._kept or whole.grad is not None
            for index, whole in enumerate(self.wholes)
        ]

    def _take(self, index: int) -> torch.Tensor | None:
        """This rank's whole gradient of a parameter, which is then no longer held; None if there is none."""
        gradient, kept = self._take_gradient(index), self._kept.pop(index, None)
        if kept is not None:
            gradient = kept if gradient is None else kept.add_(gradient)
        if gradient is not None:
            self._seen.add(index)
        return gradient

    def _take_gradient(self, index: int) -> torch.Tensor | None:
        """What backward has left, unless it can't be averaged."""
        gradient, self.wholes[index].grad = self.wholes[index].grad, None
        return None if gradient is None or self._refuses(index, gradient) else gradient

    def _refuses(self, index: int, gradient: torch.Tensor) -> bool:
        self._refused = self._refused or gradient_problem(repr(self.names[index]), gradient)
        return self._refused is not None
