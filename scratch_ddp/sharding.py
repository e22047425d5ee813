"""Who works on which items: shards that lose nothing, and batches of which n ranks take a share each."""

from collections.abc import Iterator, Sequence

import torch

from scratch_ddp.data import Batch, Item, collate

KINDS = ("interleaved", "contiguous")


def shard(order: Sequence[int], rank: int, world_size: int, kind: str = "interleaved") -> list[int]:
    """Return this rank's part of `order`; every element goes to exactly one rank, and shares differ by one at most.

    Interleaved: elements rank, rank + n, rank + 2n, … With b elements at a time, n ranks then work on the same n·b
    elements as one process would. Contiguous: one block a rank, so that they work on other batches.
    """
    if kind == "interleaved":
        return list(order[rank::world_size])
    if kind == "contiguous":
        return list(order[rank * len(order) // world_size : (rank + 1) * len(order) // world_size])
    raise ValueError(f"kind of shard: {kind!r}; allowed are {', '.join(KINDS)}")


class Batches:
    """Global batches of `batch_size` items, of which this rank takes its share.

    Every rank has the same number of batches. The last one may be smaller, and empty on some ranks (`Batch.count` 0).
    With `seed`, each epoch has its own order, the same on every rank; without, the order stays as it is. Raises
    ValueError if there are fewer items than ranks, or if the ranks can't share a batch evenly. No communication.
    """

    def __init__(
        self,
        items: Sequence[Item],
        batch_size: int,
        pad: int,
        rank: int = 0,
        world_size: int = 1,
        kind: str = "interleaved",
        seed: int | None = None,
    ):
        if len(items) < world_size:
            raise ValueError(f"{len(items)} items can't be shared by {world_size} ranks: each needs one at least")
        if batch_size < 1 or batch_size % world_size:
            raise ValueError(f"a global batch of {batch_size} can't be shared evenly by {world_size} ranks")
        if kind not in KINDS:
            raise ValueError(f"kind of shard: {kind!r}; allowed are {', '.join(KINDS)}")
        self.items, self.batch_size, self.pad = items, batch_size, pad
        self.rank, self.world_size, self.kind, self.seed = rank, world_size, kind, seed

    def __len__(self) -> int:
        """Batches an epoch."""
        return -(-len(self.items) // self.batch_size)

    def epoch(self, number: int = 0) -> Iterator[Batch]:
        """This rank's batches of one epoch."""
        shards = [shard(self._order(number), rank, self.world_size, self.kind) for rank in range(self.world_size)]
        share = self.batch_size // self.world_size
        for start in range(0, len(self) * share, share):
            everyones = [part[start : start + share] for part in shards]
            mine = everyones[self.rank]
            inputs, labels = collate([self.items[i] for i in mine or shards[self.rank][:1]], self.pad)
            yield Batch(inputs, labels, len(mine), sum(map(len, everyones)))

    def _order(self, epoch: int) -> list[int]:
        if self.seed is None:
            return list(range(len(self.items)))
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(len(self.items), generator=generator).tolist()
