"""Sentence pairs with the question "do both say the same?": loading, tokenising, and each rank's share of a batch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

from scratch_ddp.training.pairs import make_pairs

COLUMNS = ("sentence1", "sentence2", "label")


def load_pairs(source: str | None = None):
    """Return a `datasets.DatasetDict` with splits train, validation, test, and columns sentence1, sentence2, label.

    `source` is "built-in" (our own pairs; the default), "hub" (GLUE's MRPC, downloaded once), or a local folder with
    files train*, validation* and optionally test*, in parquet, csv or json. Rank 0 prints what it is. Raises what
    `datasets` does, and ValueError for a split or a value that is missing. No communication.
    """
    import datasets

    place = source or "built-in"
    if place == "built-in":
        pairs = datasets.DatasetDict({name: datasets.Dataset.from_dict(rows) for name, rows in make_pairs().items()})
    else:
        pairs = datasets.load_dataset(*(("nyu-mll/glue", "mrpc") if place == "hub" else (place,)))
        if missing := {"train", "validation"} - pairs.keys():
            raise ValueError(f"{place!r} has no {' and no '.join(sorted(missing))} pairs")
        pairs = pairs.select_columns(list(COLUMNS))
        for split, rows in pairs.items():
            if None in sentences(rows) or not set(rows["label"]) <= {0, 1}:
                raise ValueError(f"{place!r}, {split}: each pair needs two sentences, and the label 0 or 1")
    sizes = ", ".join(f"{len(rows)} {split}" for split, rows in pairs.items())
    print_once(f"pairs: {place} ({'as asked' if source else 'the default'}); {sizes}")
    return pairs


def print_once(line: str) -> None:
    """Print the line on rank 0, or in a process without ranks."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(line, flush=True)


def sentences(rows: Any) -> list[str]:
    """All sentences of a split, from which to build a tokenizer."""
    return [*rows["sentence1"], *rows["sentence2"]]


class Item(NamedTuple):
    tokens: list[int]
    label: int


def tokenise(rows: Any, tokenizer: Any, max_length: int = 256) -> list[Item]:
    """Turn each pair into at most `max_length` token ids: sentence 1, separator, sentence 2, separator.

    The separator is the tokenizer's own, or its end-of-text token. If a pair is too long, the longer sentence is
    shortened at its end.
    """
    separator = tokenizer.sep_token_id if tokenizer.sep_token_id is not None else tokenizer.eos_token_id
    encoded = [tokenizer(list(rows[name]), add_special_tokens=False)["input_ids"] for name in COLUMNS[:2]]
    items = []
    for first, second, label in zip(*encoded, rows["label"], strict=True):
        while len(first) + len(second) > max_length - 2:
            max(second, first, key=len).pop()
        items.append(Item([*first, separator, *second, separator], label))
    return items


@dataclass(frozen=True)
class Batch:
    """A rank's share of a global batch. Tensors have at least one row; the first `count` rows are the rank's own."""

    inputs: dict[str, torch.Tensor]  # input_ids and attention_mask: int64 (rows, longest), padded on the right
    labels: torch.Tensor  # int64 (rows,)
    count: int  # 0 if there were fewer items than ranks: then a row fills in, to keep all ranks in step
    global_count: int  # over all ranks
    numbers: tuple[int, ...] = ()  # which items the rank's own rows are

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch on another device."""
        inputs = {name: tensor.to(device) for name, tensor in self.inputs.items()}
        return replace(self, inputs=inputs, labels=self.labels.to(device))


def shard(order: Sequence[int], rank: int, world_size: int, kind: str = "interleaved") -> list[int]:
    """Return this rank's part of `order`. Every element goes to exactly one rank; sizes differ by one at most.

    "interleaved": elements rank, rank + n, rank + 2n, … With b elements at a time, n ranks then work on the same n·b
    elements as one process would. "contiguous": one block per rank, so that their batches are different ones.
    """
    first, end = rank * len(order) // world_size, (rank + 1) * len(order) // world_size
    return list({"interleaved": order[rank::world_size], "contiguous": order[first:end]}[kind])


@dataclass
class Batches:
    """Global batches of `batch_size` items, of which this rank takes its share.

    Every rank has the same number of batches. The last one may be smaller, and empty on some ranks (`Batch.count` 0).
    With `seed`, each epoch has its own order, the same on every rank; without, items stay in their order. Raises
    ValueError if the ranks can't share a batch evenly. There are as many items as ranks, or more. No communication.
    """

    items: Sequence[Item]
    batch_size: int
    pad: int
    rank: int = 0
    world_size: int = 1
    kind: str = "interleaved"
    seed: int | None = None

    def __post_init__(self) -> None:
        if len(self.items) < self.world_size:
            raise ValueError(f"{len(self.items)} items can't be shared by {self.world_size} ranks: each needs one")
        if self.batch_size % self.world_size:
            raise ValueError(f"a global batch of {self.batch_size} can't be shared evenly by {self.world_size} ranks")

    def __len__(self) -> int:
        """Batches per epoch."""
        return -(-len(self.items) // self.batch_size)

    def epoch(self, number: int = 0, first: int = 0) -> Iterator[Batch]:
        """This rank's batches of one epoch, from batch `first` on."""
        shards = [shard(self._order(number), rank, self.world_size, self.kind) for rank in range(self.world_size)]
        share = self.batch_size // self.world_size
        for start in range(first * share, len(self) * share, share):
            everyones = [part[start : start + share] for part in shards]
            mine = everyones[self.rank]
            items = [self.items[i] for i in mine or shards[self.rank][:1]]
            tokens = [torch.tensor(item.tokens) for item in items]
            ids = pad_sequence(tokens, batch_first=True, padding_value=self.pad)
            mask = pad_sequence([torch.ones_like(each) for each in tokens], batch_first=True)
            labels = torch.tensor([item.label for item in items])
            inputs = {"input_ids": ids, "attention_mask": mask}
            yield Batch(inputs, labels, len(mine), sum(map(len, everyones)), tuple(mine))

    def _order(self, epoch: int) -> list[int]:
        if self.seed is None:
            return list(range(len(self.items)))
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(len(self.items), generator=generator).tolist()
