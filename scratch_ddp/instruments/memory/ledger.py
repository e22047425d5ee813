"""A ledger of one rank's memory: which elements it holds and how many it sends, block by block.

The ledger observes; nothing is declared. A dispatch mode sees every tensor that an operation reads or makes inside a
block, and the ledger keeps a weak reference to its storage. The rank holds the storages that are still alive at the end
of the block, at the size that they have then. Names only label storages; those without a name are listed as "unnamed".
"""

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from scratch_ddp.instruments.traffic import traffic
from scratch_ddp.instruments.traffic.watch import LightMode, in_a_call

OTHER, UNNAMED = "other", "unnamed"
_PATIENCE = 20  # milliseconds that a library's threads get to release tensors


@dataclass(frozen=True)
class Held:
    """A storage under the first name found for it. A view shares its parent's storage and keeps all of it alive."""

    name: str
    kind: str
    elements: int


@dataclass(frozen=True)
class Moment:
    """The end of a block: what this rank holds then, and how many elements it sent inside.

    `peak`: the most elements held after any operation of the block.
    """

    name: str
    held: tuple[Held, ...]
    sent: int
    peak: int

    def elements(self, *kinds: str) -> int:
        """Elements held in storages of these kinds; without kinds, in all storages."""
        return sum(each.elements for each in self.held if not kinds or each.kind in kinds)

    def __str__(self) -> str:
        """`gather W1        sent 12   own 8 (w1 w2), borrowed 16 (W1)`"""
        kinds = dict.fromkeys(each.kind for each in self.held)
        names = {kind: " ".join(each.name for each in self.held if each.kind == kind) for kind in kinds}
        held = ", ".join(f"{kind} {self.elements(kind)} ({names[kind]})" for kind in kinds)
        return f"{self.name:18} {f'sent {self.sent}' if self.sent else '':8} {held}"


class MemoryLedger:
    """Records what this rank holds and sends.

    ```python
    m = SimpleNamespace(w1=…)                            # what this rank holds, by name
    ledger = MemoryLedger(m, own="w1", borrowed="W1")    # kinds: names that are added up together
    with ledger("gather W1"):
        m.W1 = gather(m.w1)
    print(ledger.moments[-1], ledger.sent, ledger.peak("own", "borrowed"))
    ```
    `names` may hold tensors and lists of them. An element is `dtype.itemsize` bytes, whatever dtype a tensor has. What
    is sent is counted by `traffic`: for torch's collectives, by the formula for a ring.

    Not seen: what a library allocates inside one of its operations (gloo and NCCL copy some collectives' tensors), and
    tensors that were made outside all blocks, have no name, and are not used in a block.
    """

    def __init__(self, names: SimpleNamespace, dtype: torch.dtype = torch.float64, **kinds: str):
        self.moments: list[Moment] = []
        self._names, self._itemsize = names, dtype.itemsize
        self._order = [name for text in kinds.values() for name in text.split()]
        self._kinds = {name: kind for kind, text in kinds.items() for name in text.split()}
        if len(self._kinds) < len(self._order):
            twice = sorted({name for name in self._order if self._order.count(name) > 1})
            raise ValueError(f"each name has one kind, but {', '.join(twice)} is given twice")
        self._storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._peak, self._block = 0, ""
        self.patience = _PATIENCE
        self.unremarkable = 0  # elements: up to here it does not matter what other threads are about to release

    @contextlib.contextmanager
    def __call__(self, moment: str) -> Iterator[None]:
        """Observe the block, and record a moment at its end. A block that raises leaves none."""
        if self._block:
            raise RuntimeError(f"{moment!r} begins inside {self._block!r}: moments come one after another")
        self._block, self._peak = moment, 0
        try:
            self._see(vars(self._names))
            with traffic() as counted, _Observer(self._see):
                yield
            self._see(vars(self._names))
        finally:
            self._block = ""
        self._wait_for_threads(sum(storage.nbytes() for storage in _storages(vars(self._names))))
        sent = counted.wire_bytes // self._itemsize
        self.moments.append(Moment(moment, self._held(), sent, self._peak // self._itemsize))

    @property
    def sent(self) -> int:
        """Elements that this rank has sent in all blocks together."""
        return sum(moment.sent for moment in self.moments)

    def peak(self, *kinds: str) -> int:
        """The most elements held: of `kinds` at the end of any block, without kinds after any operation."""
        if unknown := set(kinds) - {*self._kinds.values(), OTHER}:
            known = ", ".join(dict.fromkeys([*self._kinds.values(), OTHER]))
            raise ValueError(f"no kind is called {', '.join(sorted(unknown))}; there are {known}")
        moments = self.moments
        return max((each.elements(*kinds) if kinds else each.peak for each in moments), default=0)

    def storages(self) -> list[torch.UntypedStorage]:
        """All that were seen and are still there."""
        return list(self._storages)

    def _see(self, values: Any) -> None:
        self._storages.update(_storages(values))
        self._peak = max(self._peak, self._wait_for_threads(self._peak))

    def _wait_for_threads(self, expected: int) -> int:
        """Return the bytes held. If they are more than expected, wait for the library's threads first: they release a
        collective's tensors only shortly after it has ended."""
        expected = max(expected, self.unremarkable * self._itemsize)
        for _ in range(self.patience):
            held = sum(storage.nbytes() for storage in self._storages)
            if held <= expected:
                break
            time.sleep(0.001)
        else:  # no thread will release them: the next operations need not wait as long
            self.patience = min(self.patience, _PATIENCE)
        return held

    def _held(self) -> tuple[Held, ...]:
        unnamed, held = set(self._storages), []
        places = {name: place for place, name in enumerate(self._order)}
        for name in sorted(vars(self._names), key=lambda name: places.get(name, len(places))):
            storages = _storages(vars(self._names)[name]) & unnamed
            unnamed -= storages
            if storages:
                held.append(Held(name, self._kinds.get(name, OTHER), self._elements(storages)))
        if elements := self._elements(unnamed):
            held.append(Held(UNNAMED, OTHER, elements))
        return tuple(held)

    def _elements(self, storages: set[torch.UntypedStorage]) -> int:
        return sum(storage.nbytes() for storage in storages) // self._itemsize


class _Observer(LightMode):
    """Reports what every operation of this thread reads and makes. gloo's threads inherit the mode."""

    def __init__(self, see: Callable[[Any], None]):
        super().__init__()
        self._see, self._thread = see, threading.get_ident()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if threading.get_ident() == self._thread and not in_a_call():
            self._see((args, kwargs, result))
        return result


def _storages(values: Any) -> set[torch.UntypedStorage]:
    """The storages of all tensors in nested lists and dictionaries. torch returns the same object for one storage."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return {tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided}
