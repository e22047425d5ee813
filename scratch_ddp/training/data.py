"""Sentence pairs with the question "do both say the same?": loading, tokenising, and each rank's share of a batch.

Shards lose no item. Of each global batch, every one of n ranks takes a share.
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from scratch_ddp.common.agreement import digest
from scratch_ddp.common.extras import extra
from scratch_ddp.training.pairs import make_pairs
from scratch_ddp.training.sources import HubFiles, choose_for_all, first_rank_first, print_once

SPLITS = ("train", "validation", "test")
MRPC = HubFiles("nyu-mll/glue", tuple(f"mrpc/{split}-00000-of-00001.parquet" for split in SPLITS), "dataset")
FORMATS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}
COLUMNS = ("sentence1", "sentence2", "label", "idx")
KINDS = ("interleaved", "contiguous")  # of shards


def load_pairs(source: str | None = None, group: dist.ProcessGroup | None = None):
    """Return a `datasets.DatasetDict` (train, validation, test) with MRPC's columns sentence1, sentence2, label, idx.

    `source`, or else the environment variable SCRATCH_DDP_DATA, is "hub" (GLUE's MRPC), "built-in" (our own pairs), or
    a local folder with files train*, validation* and optionally test*, in parquet, csv or json. Without either, the hub
    is taken if it answers within seconds or its files are cached, else the built-in pairs. A printed line says which.
    Every rank of the group calls it: rank 0 decides and downloads while the others wait. Raises ValueError on every
    rank if a file is missing or corrupt, a column is missing, a split is empty, or a label is neither 0 nor 1.
    """
    place, why = choose_for_all(source, "SCRATCH_DDP_DATA", MRPC, group)
    pairs = _built_in() if place == "built-in" else first_rank_first(lambda: _read(place), group)
    print_once(f"pairs: {place} ({why}); " + ", ".join(f"{len(rows)} {split}" for split, rows in pairs.items()), group)
    return pairs


def _built_in():
    with extra("text"):
        import datasets

    features = datasets.Features(
        sentence1=datasets.Value("string"),
        sentence2=datasets.Value("string"),
        label=datasets.ClassLabel(names=["not_equivalent", "equivalent"]),
        idx=datasets.Value("int32"),
    )
    splits = make_pairs().items()
    return datasets.DatasetDict({split: datasets.Dataset.from_dict(columns, features) for split, columns in splits})


def _read(place: str):
    with extra("text"):
        import datasets

    folder = MRPC.fetch() if place == "hub" else Path(place).expanduser()
    files = {split: sorted(str(f) for f in folder.glob(f"{split}*") if f.is_file()) for split in SPLITS}
    with _quiet(datasets):
        pairs = {split: _read_split(datasets, place, split, names) for split, names in files.items() if names}
    return check_pairs(datasets.DatasetDict(pairs), place)


def _read_split(datasets: Any, place: str, split: str, files: list[str]):
    """Read one split in the format of its files' suffix; separately from the others, so that an error can name it."""
    kind = FORMATS.get(Path(files[0]).suffix)
    if kind is None:
        raise ValueError(f"split {split!r} of {place!r}: {Path(files[0]).name} is not one of {', '.join(FORMATS)}")
    try:
        return datasets.load_dataset(kind, data_files={split: files}, split=split)
    except Exception as error:
        if "corresponds to no data" in str(error):
            raise ValueError(f"split {split!r} of {place!r} is empty") from error
        cause = error.__cause__ or error
        raise ValueError(f"split {split!r} of {place!r} can't be read: {type(cause).__name__}: {cause}") from error


@contextlib.contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Silence the library's progress bars, and its log of errors, which are raised anyway."""
    shown, level = datasets.utils.logging.is_progress_bar_enabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if shown:
            datasets.enable_progress_bars()


def check_pairs(pairs: Any, place: str) -> Any:
    """Return the data set, with an `idx` added where it lacks one. Raises ValueError, saying what is missing where."""
    for split in SPLITS[:2]:
        if split not in pairs:
            raise ValueError(f"{place!r} has no split {split!r}: no file {split}* ({', '.join(FORMATS)})")
    for split, rows in pairs.items():
        if missing := [name for name in COLUMNS[:3] if name not in rows.column_names]:
            raise ValueError(
                f"split {split!r} of {place!r} has no column {missing[0]!r}, only {', '.join(rows.column_names)}"
            )
        if not len(rows):
            raise ValueError(f"split {split!r} of {place!r} is empty")
        for row, (first, second, label) in enumerate(zip(*(rows[name] for name in COLUMNS[:3]), strict=True)):
            if label not in (0, 1) or not isinstance(first, str) or not isinstance(second, str):
                raise ValueError(f"row {row} of split {split!r} of {place!r} is not two sentences and a label 0 or 1")
        if "idx" not in rows.column_names:
            pairs[split] = rows.add_column("idx", list(range(len(rows))))
    return pairs


def sentences(rows: Any) -> list[str]:
    """All sentences of a split, from which to build a tokenizer."""
    return [*rows["sentence1"], *rows["sentence2"]]


SHORTEST = 4  # tokens of a pair: one of each sentence, and two separators


@dataclass(frozen=True)
class Item:
    tokens: list[int]
    label: int


def tokenise(rows: Any, tokenizer: Any, max_length: int = 256) -> list[Item]:
    """Turn each pair into at most `max_length` token ids: sentence 1, separator, sentence 2, separator.

    The separator is the tokenizer's own, or its end-of-text token. If a pair is too long, the longer sentence is
    shortened at its end. Raises ValueError if the tokenizer has neither token, or `max_length` no room for a token of
    each sentence.
    """
    if max_length < SHORTEST:
        raise ValueError(f"max_length must be {SHORTEST} or more, for a token of each sentence; it is {max_length}")
    separator = tokenizer.sep_token_id if tokenizer.sep_token_id is not None else tokenizer.eos_token_id
    if separator is None:
        raise ValueError("the tokenizer has neither a separator nor an end-of-text token")
    encoded = [tokenizer(list(rows[name]), add_special_tokens=False)["input_ids"] for name in COLUMNS[:2]]
    items = []
    for first, second, label in zip(*encoded, rows["label"], strict=True):
        while len(first) + len(second) > max_length - 2:
            longer = first if len(first) > len(second) else second
            longer.pop()
        items.append(Item([*first, separator, *second, separator], label))
    return items


@dataclass(frozen=True)
class Batch:
    """A rank's share of a global batch. Tensors have at least one row; the first `count` rows are the rank's own."""

    inputs: dict[str, torch.Tensor]  # input_ids and attention_mask: int64 (rows, longest)
    labels: torch.Tensor  # int64 (rows,)
    count: int  # 0 if there were fewer items than ranks: then a row fills in, to keep all ranks in step
    global_count: int  # over all ranks
    numbers: tuple[int, ...] = ()  # which items the rank's own rows are

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch on another device."""
        inputs = {name: tensor.to(device) for name, tensor in self.inputs.items()}
        return replace(self, inputs=inputs, labels=self.labels.to(device))


def collate(items: Sequence[Item], pad: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Pad on the right to the longest item: ({"input_ids", "attention_mask"} of (rows, longest), labels of (rows,))."""
    longest = max(len(item.tokens) for item in items)
    ids = torch.tensor([item.tokens + [pad] * (longest - len(item.tokens)) for item in items])
    mask = torch.tensor([[1] * len(item.tokens) + [0] * (longest - len(item.tokens)) for item in items])
    return {"input_ids": ids, "attention_mask": mask}, torch.tensor([item.label for item in items])


def shard(order: Sequence[int], rank: int, world_size: int, kind: str = "interleaved") -> list[int]:
    """Return this rank's part of `order`. Every element goes to exactly one rank; sizes differ by one at most.

    Interleaved: elements rank, rank + n, rank + 2n, … With b elements at a time, n ranks then work on the same n·b
    elements as one process would. Contiguous: one block per rank, so that their batches are different ones. Raises
    ValueError for another `kind`.
    """
    _check_kind(kind)
    if kind == "interleaved":
        return list(order[rank::world_size])
    return list(order[rank * len(order) // world_size : (rank + 1) * len(order) // world_size])


class Batches:
    """Global batches of `batch_size` items, of which this rank takes its share.

    Every rank has the same number of batches. The last one may be smaller, and empty on some ranks (`Batch.count` 0).
    With `seed`, each epoch has its own order, the same on every rank; without, items stay in their order. Raises
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
        _check_kind(kind)
        self.items, self.batch_size, self.pad = items, batch_size, pad
        self.rank, self.world_size, self.kind, self.seed = rank, world_size, kind, seed

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
            inputs, labels = collate([self.items[i] for i in mine or shards[self.rank][:1]], self.pad)
            yield Batch(inputs, labels, len(mine), sum(map(len, everyones)), tuple(mine))

    def settings(self) -> dict[str, Any]:
        """What decides which items each global batch has, by name: equal settings, equal batches."""
        settings = {"seed": self.seed, "batch size": self.batch_size, "shards": self.kind}
        if self.kind != KINDS[0]:  # of other shards, each number of ranks makes other batches
            settings["ranks"] = self.world_size
        lines = [f"{item.label} {item.tokens}" for item in self.items]
        return settings | {"items": len(self.items), "data": f"{digest(lines):014x}"}

    def _order(self, epoch: int) -> list[int]:
        if self.seed is None:
            return list(range(len(self.items)))
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(len(self.items), generator=generator).tolist()


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind of shard: {kind!r}; allowed are {', '.join(KINDS)}")
