"""A ledger of one rank's memory: which elements it holds and how many it sends, block by block.

A dispatch mode sees every tensor that an operation reads or makes inside a block, and the ledger keeps a weak reference
to its storage. The rank holds the storages that are still alive at the end of the block, at the size that they have
then. Names only label storages; those without a name are listed as "unnamed".
"""

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from scratch_ddp.common.accounting import is_part_of_a_call
from scratch_ddp.instruments.traffic import Counted, traffic
from scratch_ddp.instruments.traffic.calls import LightMode

_PATIENCE = 20  # milliseconds that a library's threads get to release tensors


@dataclass(frozen=True)
class Held:
    """A storage under the first name found for it. A view shares its parent's storage and keeps all of it alive."""

    name: str
    kind: str
    elements: int


@dataclass(frozen=True)
class Moment:
    """The end of a block: what is held then; elements sent inside; the `peak` held after any operation of it."""

    name: str
    held: tuple[Held, ...]
    sent: int
    peak: int

    def elements(self, *kinds: str) -> int:
        """Elements held in storages of these kinds; without kinds, in all storages."""
        return sum(each.elements for each in self.held if not kinds or each.kind in kinds)

    def __str__(self) -> str:
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
    is sent is counted by `traffic`. Not seen: what a library allocates inside one of its operations, and tensors from
    outside all blocks that have no name and are not used in a block.
    """

    def __init__(self, names: SimpleNamespace, dtype: torch.dtype = torch.float64, **kinds: str):
        self.moments: list[Moment] = []
        self._names, self._itemsize = names, dtype.itemsize
        self._kinds = {name: kind for kind, text in kinds.items() for name in text.split()}
        self._storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._peak, self._settled = 0, (0, 0)

    @contextlib.contextmanager
    def __call__(self, moment: str) -> Iterator[None]:
        """Observe the block, and record a moment at its end. A block that raises leaves none."""
        self._peak, self._settled = 0, (0, 0)
        with traffic() as counted:
            self._see(vars(self._names), counted)
            with _Observer(lambda values: self._see(values, counted)):
                yield
            self._see(vars(self._names), counted)
        self._settle(_nbytes(_storages(vars(self._names))))
        sent = counted.wire_bytes // self._itemsize
        self.moments.append(Moment(moment, self._held(), sent, self._peak // self._itemsize))

    @property
    def sent(self) -> int:
        """Elements that this rank has sent in all blocks together."""
        return sum(moment.sent for moment in self.moments)

    def peak(self, *kinds: str) -> int:
        """The most elements held: of `kinds` at the end of any block, without kinds after any operation."""
        return max((each.elements(*kinds) if kinds else each.peak for each in self.moments), default=0)

    def _see(self, values: Any, counted: Counted) -> None:
        self._storages.update(_storages(values))
        communicated = len(counted.events), sum(counted.setup.calls.values())
        if communicated != self._settled and not self._settle(self._peak):
            self._settled = communicated  # nobody will release anything before the next call
        self._peak = max(self._peak, _nbytes(self._storages))

    def _settle(self, expected: int) -> bool:
        """Wait a little for a library's threads to release a collective's tensors. Returns whether no more is held."""
        for _ in range(_PATIENCE):  # counted, not timed: on a busy machine the threads need longer, too
            if _nbytes(self._storages) <= expected:
                return True
            time.sleep(0.001)
        return False

    def _held(self) -> tuple[Held, ...]:
        unnamed, held = set(self._storages), []
        for name in sorted(vars(self._names), key=[*self._kinds, *vars(self._names)].index):
            storages = _storages(vars(self._names)[name]) & unnamed
            unnamed -= storages
            if storages:
                held.append(Held(name, self._kinds.get(name, "other"), _nbytes(storages) // self._itemsize))
        if elements := _nbytes(unnamed) // self._itemsize:
            held.append(Held("unnamed", "other", elements))
        return tuple(held)


class _Observer(LightMode):
    """Reports what every operation of this thread reads and makes. gloo's threads inherit the mode."""

    def __init__(self, see: Callable[[Any], None]):
        super().__init__()
        self._see, self._thread = see, threading.get_ident()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if threading.get_ident() == self._thread and not is_part_of_a_call():
            self._see((args, kwargs, result))
        return result


def _nbytes(storages: Iterable[torch.UntypedStorage]) -> int:
    return sum(storage.nbytes() for storage in storages)


def _storages(values: Any) -> set[torch.UntypedStorage]:
    """The storages of all tensors in nested lists and dictionaries. torch returns the same object for one storage."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return {tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided}
