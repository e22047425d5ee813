"""A unit: parameters that are gathered, freed and reduced with one message each, and what a rank holds of them."""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from scratch_ddp.common.replicas import gradient_problem
from scratch_ddp.common.wrapper import OnItsWay
from scratch_ddp.fsdp.comm import Ranks, Started

ROOT = ""  # the name of the whole model, as in named_modules()
Place = tuple[nn.Module, str]  # a module, and the name under which it holds a parameter


def hold(places: list[Place], parameter: nn.Parameter) -> None:
    """Let modules hold the parameter in these places."""
    for module, name in places:
        if type(module).__setattr__ is nn.Module.__setattr__:
            module._parameters[name] = parameter
        else:  # nn.LSTM keeps a list of its parameters up to date
            setattr(module, name, parameter)


class Piece:
    """One parameter of a unit, cut on dim 0 as DTensor's Shard(0) does: rank r has rows r·chunk to (r+1)·chunk.

    A scalar counts as one row of one element. The last ranks may hold fewer rows or none, but the ranks' parts of a
    message have one size: gaps fill them up.
    `places`: which modules hold it. `shard`: what they hold between passes, a DTensor. `whole`: what they hold while it
    is gathered; a view of memory that is there only then.
    """

    shard: nn.Parameter
    whole: nn.Parameter
    on_its_way: OnItsWay  # of the shard's shape

    def __init__(self, name: str, parameter: nn.Parameter, places: list[Place], offset: int, count: int):
        self.name, self.places, self.shape, self.offset = name, places, parameter.shape, offset
        self.chunk = max(1, -(-(self.shape or (1,))[0] // count))  # rows per rank
        self.size = self.chunk * self.shape[1:].numel()  # elements in each rank's part of a message, gaps included
        self.is_trained = False  # since it was gathered
        self.gradient: torch.Tensor | None = None  # of backward passes here, whole, not averaged yet
        self.has_gradient = False  # had one since the last `hand_out`
        self.is_marked = False  # the shard's `.grad` was set to `on_its_way`
        self.earlier: torch.Tensor | None = None  # what was there before

    def rows_of(self, part: torch.Tensor, rank: int) -> torch.Tensor:
        """The rank's rows, a view of its part of a message: shape (rows, …), other dimensions as the parameter's."""
        count = max(0, min(self.chunk, (self.shape or (1,))[0] - rank * self.chunk))
        return part[self.offset : self.offset + self.size].view(self.chunk, *self.shape[1:])[:count]

    def write(self, message: torch.Tensor, whole: torch.Tensor | None, scale: float = 1) -> None:
        """Put a whole tensor's rows, times `scale`, into a message of shape (n, part), and zeros into the gaps."""
        place = message[:, self.offset : self.offset + self.size]
        flat = message.new_empty(0) if whole is None else whole.reshape(-1)
        full = len(flat) // max(1, self.size)  # ranks that have all their rows
        torch.mul(flat[: full * self.size].view(full, self.size), scale, out=place[:full])
        if full < len(place):
            place[full:].zero_()
            rest = flat[full * self.size :]
            torch.mul(rest, scale, out=place[full, : len(rest)])

    @property
    def is_cleared(self) -> bool:
        """Whether `zero_grad` has thrown its gradient away since backward."""
        return self.is_marked and self.shard.grad is not self.on_its_way


class Unit:
    """Parameters that belong to one module alone, or of the root, that belong to no other module.

    They have one dtype, and all of them are trained or frozen at first. `named`: by their names in the model.
    `flat` is what this rank keeps: its rows of all of them, in their own dtype. The shards are DTensors on its memory.
    The whole parameters are views of one storage, which has memory only while they are gathered: as it is always the
    same one, what autograd has saved of them has its values back in backward. Wholes and messages have `compute_dtype`.
    Starts freed, with the rows of the first rank's values: one broadcast.
    """

    def __init__(
        self,
        module_name: str,
        named: Mapping[str, nn.Parameter],
        places: Mapping[str, list[Place]],
        ranks: Ranks,
        compute_dtype: torch.dtype | None,
    ):
        first = next(iter(named.values()))
        self.module_name, self.ranks, self.dtype = module_name, ranks, first.dtype
        self.compute_dtype = compute_dtype if compute_dtype and first.is_floating_point() else first.dtype
        self.pieces: list[Piece] = []
        size = 0  # of a part
        for name, parameter in named.items():
            self.pieces.append(Piece(name, parameter, places[name], size, ranks.count))
            size += self.pieces[-1].size
        self._sizes = [each.size for each in self.pieces]
        message = first.detach().new_empty(ranks.count, size)
        for each in self.pieces:
            each.write(message, named[each.name].detach())
        dist.broadcast(message, group=ranks.everyone, group_src=0)
        self.flat = message[ranks.rank].clone()
        del message  # its memory is as large as that of the wholes
        memory = self.flat.new_empty(ranks.count * size, dtype=self.compute_dtype)
        self._storage, self._nbytes, self._columns = memory.untyped_storage(), memory.nbytes, []
        for each, padded in zip(self.pieces, memory.split([ranks.count * size for size in self._sizes]), strict=True):
            rows = ranks.dtensor(each.rows_of(self.flat, ranks.rank), each.shape or (1,))
            each.shard = nn.Parameter(rows, named[each.name].requires_grad)
            each.on_its_way = self.flat.new_zeros(()).expand(rows.shape).as_subclass(OnItsWay)
            each.whole = nn.Parameter(padded.new_empty(0), requires_grad=False)
            each.whole.data = padded[: each.shape.numel()].view(each.shape)  # its own version: filling is no change
            self._columns.append(padded.view(ranks.count, each.size))  # of rows, with gaps after the last rank's
        self._gathering: Started | None = None
        self._reducing: Started | None = None
        self._mean: torch.Tensor | None = None  # this rank's rows of the mean, flat
        self.is_gathered = True
        self.free()

    # Parameters

    @property
    def is_trained(self) -> bool:
        return any(each.shard.requires_grad for each in self.pieces)

    @property
    def is_available(self) -> bool:
        """Whether the parameters are gathered, or on their way."""
        return self.is_gathered or self._gathering is not None

    def gather(self) -> None:
        """Start the all-gather. Every rank does, also one that has them: it takes part."""
        self._drop_message()
        self._gathering = self.ranks.all_gather(self.flat.to(self.compute_dtype))

    def wait(self) -> None:
        """Wait until the parameters have their values, and hand them to the modules."""
        if self._gathering is not None:
            message, self._gathering = self._gathering.wait(), None
            self._storage.resize_(self._nbytes)
            torch.split_with_sizes_copy(message, self._sizes, dim=1, out=self._columns)
        if not self.is_gathered:
            self.is_gathered = True
            for each in self.pieces:
                each.whole.requires_grad = each.is_trained = each.shard.requires_grad  # as the caller wants it now
                hold(each.places, each.whole)

    def free(self) -> None:
        """Give the memory of the whole parameters back, and that of a message that nobody has used."""
        self._drop_message()
        self.show_shards()

    def show_shards(self) -> None:
        """Let the modules hold the shards, and give the memory of the whole parameters back. No communication."""
        if self.is_gathered:
            self.is_gathered = False
            self._storage.resize_(0)
            for each in self.pieces:
                if each.whole.requires_grad != each.is_trained:  # the caller has changed it meanwhile
                    each.shard.requires_grad = each.whole.requires_grad
                hold(each.places, each.shard)

    def abandon(self) -> None:
        """Free, and forget all gradients, without waiting for a message that may never come."""
        self._gathering = self._reducing = self._mean = None
        for each in self.pieces:
            each.whole.grad = each.shard.grad = each.gradient = each.earlier = None
            each.has_gradient = each.is_marked = False
        self.show_shards()

    def problem(self) -> str | None:
        """Say what keeps the parameters from being gathered, or return None."""
        memory = self.flat.untyped_storage().data_ptr()
        for each in self.pieces:
            held, name = each.whole if self.is_gathered else each.shard, repr(each.name)
            moved = each.shard._local_tensor.untyped_storage().data_ptr() != memory or each.shard.dtype != self.dtype
            if moved or any(module._parameters.get(attribute) is not held for module, attribute in each.places):
                return f"{name} was replaced, moved or converted after the model was wrapped: do that before"
            if each.whole._version:
                return f"the model writes to its parameter {name}, but what it writes is gone when it is freed"
            if each.shard._backward_hooks or each.shard._post_accumulate_grad_hooks:
                return f"a hook on {name} is never called, since a shard gets its gradient from sync_gradients()"
        return None

    def _drop_message(self) -> None:
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    # Gradients

    def take_gradients(self) -> None:
        """Take the whole gradients over from autograd. Raises ValueError if one can't be averaged.

        They add up in the parameters' own dtype: a sum in half precision would lose too much.
        """
        for each in self.pieces:
            gradient, each.whole.grad = each.whole.grad, None
            if gradient is not None:
                if problem := gradient_problem(repr(each.name), gradient):
                    raise ValueError(problem)
                kept, each.has_gradient = each.gradient, True
                each.gradient = gradient if kept is None else kept.to(self.dtype).add_(gradient)

    def reduce(self) -> None:
        """Start to average the whole gradients over all ranks, and drop them; zeros where there is none."""
        self.finish_reduce()
        self.take_gradients()
        message = self.flat.new_empty(self.ranks.count, len(self.flat), dtype=self.compute_dtype)
        for each in self.pieces:  # divided before the sum, which could overflow in half precision
            each.write(message, each.gradient, 1 / (self.ranks.count * self.ranks.copies))
            each.gradient = None
        self._reducing = self.ranks.reduce_scatter(message)

    def finish_reduce(self) -> None:
        """Wait for the reduction, if one has been started, and add its result to the mean."""
        started, self._reducing = self._reducing, None
        if started is not None:
            mean = started.wait().to(self.dtype)
            self._mean = mean if self._mean is None else self._mean.add_(mean)

    def reduce_over_copies(self) -> None:
        """Where the model has several copies, start to add up their means; `finish_reduce` waits for it."""
        if self._mean is not None and self.ranks.copies > 1:
            self._reducing = self.ranks.all_reduce_over_copies(self._mean.to(self.compute_dtype))
            self._mean = None

    def mark(self) -> None:
        """At the end of backward: let gradients be on their way, also where only other ranks may have one."""
        for each in self.pieces:
            if each.whole.requires_grad and each.shard.grad is not each.on_its_way:
                each.earlier, each.is_marked, each.shard.grad = each.shard.grad, True, each.on_its_way

    def hand_out(self, present: Iterable[int]) -> None:
        """Add the mean to the `.grad` of each shard whose parameter is `present`: had a gradient on any rank."""
        for each, is_present in zip(self.pieces, present, strict=True):
            if each.is_marked:
                each.shard.grad, each.earlier, each.is_marked = each.earlier, None, False
            if is_present:
                mean = DTensor(each.rows_of(self._mean, self.ranks.rank), each.shard._spec, requires_grad=False)
                each.shard.grad = mean if each.shard.grad is None else each.shard.grad.add_(mean)
            each.has_gradient = False
        self._mean = None

    def drop_cleared(self) -> None:
        """Forget the gradients that `zero_grad` has thrown away since backward."""
        for each in self.pieces:
            if each.is_cleared:
                self.finish_reduce()
                each.gradient = each.earlier = None
                each.has_gradient = each.is_marked = False
                if self._mean is not None:
                    each.rows_of(self._mean, self.ranks.rank).zero_()
