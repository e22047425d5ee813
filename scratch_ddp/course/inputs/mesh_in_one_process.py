"""A mesh of ranks in this process: for answers that are made of collectives along its dimensions.

`one_process` runs the ranks, each in a thread of its own. Here each of them gets a real DeviceMesh, whose groups hand
tensors from thread to thread.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from scratch_ddp.course.inputs.one_process import flat
from scratch_ddp.course.stand_in_group import Work, known_to_torch
from scratch_ddp.instruments.traffic.calls import METHODS, read_method

_NAMES = itertools.count()
_KNOWN = ("all_reduce", "reduce_scatter", "all_gather", "barrier")


class RanksOfMesh:
    """The mesh of a world, one for all of its ranks. ranks: of as many dimensions as there are `names`."""

    def __init__(self, ranks: torch.Tensor, names: tuple[str, ...]):
        self._ranks, self._names = ranks, names
        self._boards: dict[tuple[int, ...], list[dict[int, _Gift]]] = {}  # by group: its collectives in their order

    def run(self, answer: Callable, *args: Any) -> Any:
        """Call answer(*args, mesh) in the thread of a rank, whose seat is the default group there."""
        seat = dist.group.WORLD
        place = (self._ranks == seat.rank()).nonzero()[0].tolist()
        groups = []
        with contextlib.ExitStack() as registered:
            for dim in range(self._ranks.ndim):
                index = [*place[:dim], slice(None), *place[dim + 1 :]]
                members = tuple(self._ranks[tuple(index)].tolist())
                groups.append(_Group(seat, members, self._boards.setdefault((dim, *members), [])))
                registered.enter_context(groups[-1].registered())
            mesh = DeviceMesh.from_group(groups, "cpu", mesh=self._ranks, mesh_dim_names=self._names)
            return answer(*args, mesh)


class _Gift:
    """What a rank brings to a collective: copies of its tensors, and what the collective is."""

    def __init__(self, name: str, tensors: list[torch.Tensor], op: Any):
        self.tensors = [tensor.detach().clone().view(-1) for tensor in tensors]
        self.kind = name, op, [(tensor.numel(), tensor.dtype) for tensor in tensors]

    def __str__(self) -> str:
        name, op, tensors = self.kind
        sizes = [f"{number} × {str(dtype).removeprefix('torch.')}" for number, dtype in tensors]
        return f"{name}{' of ' if sizes else ''}{' and '.join(sizes)}{f', {op}' if op else ''}"


class _Group(dist.ProcessGroup):
    """A group along a dimension, as one of its ranks sees it."""

    def __init__(self, seat: Any, members: Sequence[int], board: list[dict[int, _Gift]]):
        self._place = members.index(seat.rank())
        super().__init__(self._place, len(members))
        self._seat, self._members, self._board, self._met = seat, members, board, 0
        self._name = f"dimension {next(_NAMES)} in one process"
        for method in METHODS:  # of the object: `traffic` replaces methods of the class, and this is no traffic
            setattr(self, method, functools.partial(self._called, method))

    def size(self) -> int:
        return len(self._members)

    def rank(self) -> int:
        return self._place

    @property
    def group_name(self) -> str:
        return self._name

    @contextlib.contextmanager
    def registered(self) -> Iterator[None]:
        """Known to torch.distributed, under a name that is its own."""
        torch._C._distributed_c10d._register_process_group(self._name, self)
        try:
            with known_to_torch(self, self._name, self._members):
                yield
        finally:
            torch._C._distributed_c10d._unregister_process_group(self._name)

    def _called(self, method: str, *args: Any, **options: Any) -> "Work":
        given = [*args, *options.values()]
        name, position = METHODS[method]
        if name not in _KNOWN:
            raise ValueError(f"calls {name} in a dimension of the mesh")
        self._seat.counts.add(read_method(method, self, given))
        op = next((value.reduceOp.op for value in given if hasattr(value, "reduceOp")), None)
        brought = flat(given[position]) if position is not None else []
        number, self._met = self._met, self._met + 1
        if number == len(self._board):
            self._board.append({})
        meeting = self._board[number]
        gift = _Gift(name, brought, op)
        first = next(iter(meeting.values()), gift)
        if gift.kind != first.kind:
            raise ValueError(f"one rank of a group calls {first}, rank {self._seat.rank()} {gift}")
        meeting[self._place] = gift
        outputs = flat(given[0]) if brought else []
        self._compare(name, brought, outputs)
        return Work(lambda: self._wait(meeting, name, outputs), outputs)

    def _compare(self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """What goes in must fit what comes out."""
        into, out = (sum(tensor.numel() for tensor in tensors) for tensors in (inputs, outputs))
        n = len(self._members)
        if (name == "reduce_scatter" and into != n * out) or (name == "all_gather" and out != n * into):
            raise ValueError(f"{name} of {into} elements into {out}, in a group of {n} ranks")

    def _wait(self, meeting: dict[int, _Gift], name: str, outputs: list[torch.Tensor]) -> None:
        self._seat.wait_until(lambda: len(meeting) == len(self._members))
        everyones = [torch.cat(meeting[place].tensors) for place in range(len(self._members) if outputs else 0)]
        if not everyones:
            return
        op = meeting[self._place].kind[1]
        result = torch.cat(everyones) if name == "all_gather" else _combined(everyones, op)
        if name == "reduce_scatter":
            result = result.chunk(len(self._members))[self._place] if result.numel() else result
        with torch.no_grad():
            for output, part in zip(outputs, result.split([each.numel() for each in outputs]), strict=True):
                output.copy_(part.view(output.shape))


def _combined(everyones: list[torch.Tensor], op: Any) -> torch.Tensor:
    by_op = {dist.ReduceOp.MAX: torch.maximum, dist.ReduceOp.MIN: torch.minimum, dist.ReduceOp.PRODUCT: torch.mul}
    return functools.reduce(by_op.get(op, torch.add), everyones)
