"""What a wrapped model consists of."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from scratch_ddp.common.replicas import Buffers
from scratch_ddp.fsdp.gradients import Gradients
from scratch_ddp.fsdp.replicated import Replicated
from scratch_ddp.fsdp.shards import Shards
from scratch_ddp.fsdp.units import Unit


@dataclass
class Parts:
    """The units, the root's first, the parameters that are not sharded, and the buffers."""

    units: list[Unit]
    replicated: Replicated
    buffers: Buffers

    @property
    def shards(self) -> Iterator[Shards]:
        for unit in self.units:
            yield from unit.shards

    @property
    def gradients(self) -> Iterator[Gradients]:
        for unit in self.units:
            yield from unit.gradients

    def masters(self) -> dict[str, nn.Parameter]:
        """What an optimizer works on: the shards, and replicated parameters whole, by their first names."""
        masters = dict(self.replicated.masters)
        for shards in self.shards:
            masters |= zip(shards.names, shards.shards, strict=True)
        return masters
