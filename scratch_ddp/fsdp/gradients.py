"""The core of sharded training, second half: whole gradients become this rank's rows of the mean over the ranks.

    reduce()  start the reduce-scatter of the gradients that backward has left, and drop them
    finish()  wait for it
    give()    hand the rows to the shards, as their `.grad`

Between passes a rank has no whole gradient, unless it accumulates micro-batches under `no_sync`.
"""

import torch

from scratch_ddp.fsdp.comm import Pending
from scratch_ddp.fsdp.layout import Rows, lay_out
from scratch_ddp.fsdp.shards import Shards


class Gradients:
    """The gradients of the parameters of a `Shards`. Messages have the compute dtype, what is kept has the shards'."""

    def __init__(self, shards: Shards):
        self.shards = shards
        self.places: dict[int, Rows] = {}  # where a message has the rows of each parameter that is trained
        self.kept: dict[int, torch.Tensor] = {}  # whole gradients of micro-batches that were not synchronised
        self.seen: set[int] = set()  # the parameters that had a gradient here since the last `give`
        self.refused: str | None = None  # a gradient that can't be averaged
        self.mean: torch.Tensor | None = None  # this rank's rows of all of them, flat
        self._size = 0
        self._under_way: Pending | None = None
        self.settle()

    def settle(self) -> None:
        """Lay out the messages, for the parameters that are trained now: the same ones on every rank, or none fits."""
        trained = [i for i, is_trained in enumerate(self.shards.trained) if is_trained]
        if list(self.places) != trained:
            shapes = (self.shards.parameters[i].shape for i in trained)
            rows, self._size = lay_out(shapes, self.shards.world_size)
            self.places = dict(zip(trained, rows, strict=True))

    def reduce(self) -> None:
        """Start to average the whole gradients, and drop them. One reduce-scatter, of the same size every time."""
        self.finish()
        message = self._message()
        if message.numel():
            self._under_way = self.shards.comm.reduce_scatter(message)
        else:
            self.mean = message[0]

    def is_through(self) -> bool:
        """True if no reduce-scatter is under way that would have to be waited for."""
        return self._under_way is None or self._under_way.is_completed()

    def finish(self) -> None:
        """Wait for the reduce-scatter, if one is under way."""
        if self._under_way is not None:
            mean, self._under_way = self._under_way.wait().to(self.shards.dtype), None
            self.mean = mean if self.mean is None else self.mean.add_(mean)

    def give(self, present: set[int]) -> None:
        """Add the rows of the mean to the shards' gradients, of those parameters that had a gradient on any rank."""
        self.finish()
        shards = self.shards
        for i, place in self.places.items():
            if i in present and self.mean is not None:
                shard, rows = shards.shards[i], place.shard(self.mean, shards.rank)
                shard.grad = rows if shard.grad is None else shard.grad.add_(rows)
        self.mean = None
        self.seen.clear()

    def keep(self) -> None:
        """Keep the whole gradients for later, in the shards' dtype: a sum in half precision would lose too much."""
        if self.shards.compute_dtype != self.shards.dtype:
            for i in self.places:
                gradient = self._take(i)
                if gradient is not None:
                    self.kept[i] = gradient.to(self.shards.dtype)

    def waiting(self) -> bool:
        """True if there are whole gradients that were not reduced."""
        return any(i in self.kept or self.shards.parameters[i].grad is not None for i in self.places)

    def present(self) -> list[bool]:
        """Say for each parameter whether it has had a gradient here since the last `give`."""
        fresh = {i for i in self.places if self.shards.parameters[i].grad is not None}
        return [i in fresh or i in self.seen for i in range(len(self.shards.parameters))]

    def problem(self) -> str | None:
        """Say which gradient can't be averaged, or return None."""
        for i in self.places:
            gradient = self.shards.parameters[i].grad
            if gradient is not None:
                self.refused = self.refused or why_not_averaged(self.shards.names[i], gradient)
        return self.refused

    def drop(self) -> None:
        """Forget everything since the last `give`."""
        for parameter in self.shards.parameters:
            parameter.grad = None
        self.kept.clear()
        self.seen.clear()
        self.mean = self._under_way = self.refused = None

    def _message(self) -> torch.Tensor:
        """The whole gradients, divided by the number of ranks; zeros where only other ranks may have one."""
        shards = self.shards
        message = shards.part.new_empty(shards.world_size, self._size, dtype=shards.compute_dtype)
        for i, place in self.places.items():
            gradient = self._take(i)
            if gradient is None:
                message[:, place.offset : place.offset + place.size].zero_()
            else:  # divided before the sum, which could overflow in half precision
                place.write(message, gradient, scale=1 / shards.world_size)
        return message

    def _take(self, i: int) -> torch.Tensor | None:
        """This rank's whole gradient of a parameter, which is then no longer held; None if there is none."""
        parameter, kept = self.shards.parameters[i], self.kept.pop(i, None)
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            self.seen.add(i)
            self.refused = self.refused or why_not_averaged(self.shards.names[i], gradient)
        if gradient is None or self.refused:
            return kept
        return gradient if kept is None else kept.add_(gradient)


def why_not_averaged(name: str, gradient: torch.Tensor) -> str | None:
    """Say why a gradient can't be averaged, or return None if it can."""
    if gradient.layout != torch.strided:
        return f"the gradient of {name!r} is sparse; only dense gradients can be averaged (sparse=False)"
    if gradient.requires_grad:
        return f"the gradient of {name!r} has a graph of its own: no double backward through a mean over ranks"
    return None
