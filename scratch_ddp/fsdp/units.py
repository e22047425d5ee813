"""A part of the model that is gathered, used and freed as one."""

from collections.abc import Iterator

from torch import nn

from scratch_ddp.fsdp.gradients import Gradients
from scratch_ddp.fsdp.shards import Shards


class Unit:
    """A module with the parameters that are its own alone, or the whole model with those that are no unit's.

    All that its methods do is done to each of its `Shards`, of which there is one a dtype: one message a unit, where
    the parameters have one dtype.
    """

    def __init__(self, name: str, module: nn.Module, shards: list[Shards]):
        self.name, self.module, self.shards = name, module, shards
        self.gradients = [Gradients(each) for each in shards]

    @property
    def is_here(self) -> bool:
        """True if the whole parameters have their values."""
        return all(shards.is_here for shards in self.shards)

    @property
    def is_coming(self) -> bool:
        """True if they are here, or on their way."""
        return all(shards.is_here or shards.arrival is not None or not shards.part.numel() for shards in self.shards)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The wrapped model's parameters that belong to the unit."""
        for shards in self.shards:
            yield from shards.parameters

    def gather(self) -> None:
        for shards in self.shards:
            shards.gather()

    def use(self) -> None:
        for shards in self.shards:
            shards.use()

    def free(self) -> None:
        for shards in self.shards:
            shards.free()

    def reduce(self) -> None:
        for gradients in self.gradients:
            gradients.reduce()

    def is_reduced(self) -> bool:
        """True if `finish_reduce` would not have to wait."""
        return all(gradients.is_through() for gradients in self.gradients)

    def finish_reduce(self) -> None:
        for gradients in self.gradients:
            gradients.finish()

    def keep_gradients(self) -> None:
        for gradients in self.gradients:
            gradients.keep()

    def abandon(self) -> None:
        """Free everything and drop all gradients, without waiting for a message that may never come."""
        for shards, gradients in zip(self.shards, self.gradients, strict=True):
            shards.attach()  # to new memory, since that message may still come
            gradients.drop()
            for shard in shards.shards:
                shard.grad = None
