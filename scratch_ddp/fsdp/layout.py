"""Where a parameter's rows lie: in the whole tensor, in a rank's shard, and in the message that carries a unit.

A message is a tensor of shape (n, part): row r is what rank r holds of every parameter, one after the other. An
all-gather fills such a message from the ranks' parts; a reduce-scatter adds up the ranks' messages, and each rank keeps
its own row. Shards of a parameter differ in size where its rows can't be shared evenly, messages can't: gaps fill them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rows:
    """One parameter, cut on dim 0: rank r has rows r·chunk to (r+1)·chunk, the last ranks fewer or none.

    This is how torch.chunk, fully_shard and DTensor's Shard(0) cut. A scalar counts as one row of one element.
    """

    shape: torch.Size  # of the whole parameter
    offset: int  # where the rows begin in each rank's part of the message, in elements
    chunk: int  # rows a rank: ⌈rows / n⌉

    @property
    def count(self) -> int:
        """Rows of the whole parameter."""
        return self.shape[0] if self.shape else 1

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.shape[1:].numel()

    @property
    def size(self) -> int:
        """Elements that the parameter takes in each rank's part of the message, gaps included."""
        return self.chunk * self.width

    def whole_size(self, world_size: int) -> int:
        """Elements that the rows of all ranks take one after the other: the whole parameter, with a gap behind it."""
        return world_size * self.size

    def values(self, whole: torch.Tensor) -> torch.Tensor:
        """The parameter itself, a view of its flat whole."""
        return whole[: self.shape.numel()].view(self.shape)

    def of_rank(self, rank: int) -> range:
        """The rows that a rank holds; empty where there are fewer rows than ranks."""
        return range(min(rank * self.chunk, self.count), min((rank + 1) * self.chunk, self.count))

    def shard(self, part: torch.Tensor, rank: int) -> torch.Tensor:
        """The rank's rows as a view of its part of a message: shape (rows, …), other dimensions as the parameter's."""
        rows = len(self.of_rank(rank))
        return part[self.offset : self.offset + rows * self.width].view(rows, *self.shape[1:])

    def write(self, message: torch.Tensor, whole: torch.Tensor, scale: float = 1.0) -> None:
        """Put a whole tensor's rows, times `scale`, where they belong in a message of shape (n, part)."""
        for place, rows in self._pairs(message, whole.reshape(-1)):
            torch.mul(rows, scale, out=place) if scale != 1.0 else place.copy_(rows)
        if self.chunk * message.shape[0] != self.count:
            for rank, part in enumerate(message):  # gaps are sent too: let them be zeros
                part[self.offset + len(self.of_rank(rank)) * self.width : self.offset + self.size].zero_()

    def read(self, message: torch.Tensor, whole: torch.Tensor) -> None:
        """Fill a whole tensor, flat and with its gap (`whole_size`), from a message of shape (n, part)."""
        whole.view(message.shape[0], self.size).copy_(message[:, self.offset : self.offset + self.size])

    def _pairs(self, message: torch.Tensor, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The same rows in the message and in the whole: of all ranks with a full chunk at once, then the rest."""
        if not self.size:
            return
        full, rest = divmod(self.count, self.chunk)
        place = message[:, self.offset : self.offset + self.size]
        yield place[:full], flat[: full * self.size].view(full, self.size)
        if rest:
            yield place[full, : rest * self.width], flat[full * self.size :]


def lay_out(shapes: Iterable[torch.Size], world_size: int) -> tuple[list[Rows], int]:
    """Return where each parameter's rows lie in a message over `world_size` ranks, and how long a rank's part is."""
    placed, offset = [], 0
    for shape in shapes:
        count = shape[0] if shape else 1
        placed.append(Rows(shape, offset, -(-count // world_size)))
        offset += placed[-1].size
    return placed, offset
