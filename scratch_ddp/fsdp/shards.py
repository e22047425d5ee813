"""How parameters are cut into shards, and the first half of sharded training: parameters are gathered and freed.

    gather()           start the all-gather of every rank's rows
    wait_for_gather()  wait for it: the model's parameters have their values
    free()             give the memory back: what remains is this rank's rows

The second half, what happens to gradients, is in `gradients`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.fsdp.comm import Comm, Pending, Ranks
from scratch_ddp.fsdp.freed_parameter import allow_reading, mark_sharded, refuse_reading


@dataclass(frozen=True)
class Rows:
    """One parameter, cut on dim 0: rank r has rows r·chunk to (r+1)·chunk, the last ranks fewer or none.

    torch.chunk, fully_shard and DTensor's Shard(0) cut in the same way. A scalar counts as one row of one element.
    Ranks may hold different numbers of rows, but their parts of a message have one size: gaps fill them up.
    """

    shape: torch.Size  # of the whole parameter
    offset: int  # where the parameter begins in each rank's part of a message, in elements
    chunk: int  # rows per rank: ⌈rows / n⌉

    @property
    def count(self) -> int:
        """Rows of the whole parameter."""
        return self.shape[0] if self.shape else 1

    @property
    def width(self) -> int:
        """Elements per row."""
        return self.shape[1:].numel()

    @property
    def size(self) -> int:
        """Elements that the parameter takes in each rank's part of a message, gaps included."""
        return self.chunk * self.width

    def of_rank(self, rank: int) -> range:
        """The rows that a rank holds; empty where there are fewer rows than ranks."""
        return range(min(rank * self.chunk, self.count), min((rank + 1) * self.chunk, self.count))

    def shard(self, part: torch.Tensor, rank: int) -> torch.Tensor:
        """The rank's rows, a view of its part of a message: shape (rows, …), other dimensions as the parameter's."""
        rows = len(self.of_rank(rank))
        return part[self.offset : self.offset + rows * self.width].view(rows, *self.shape[1:])

    def write(self, message: torch.Tensor, whole: torch.Tensor, scale: float = 1.0) -> None:
        """Put a whole tensor's rows, times `scale`, into a message of shape (n, part)."""
        for place, rows in self._pairs(message, whole.reshape(-1)):
            torch.mul(rows, scale, out=place) if scale != 1.0 else place.copy_(rows)
        if self.chunk * message.shape[0] != self.count:
            for rank, part in enumerate(message):  # gaps are sent too, as zeros
                part[self.offset + len(self.of_rank(rank)) * self.width : self.offset + self.size].zero_()

    def read(self, message: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor that a message of shape (n, part) holds, in new memory."""
        whole = message.new_empty(self.shape)
        for place, rows in self._pairs(message, whole.view(-1)):
            rows.copy_(place)
        return whole

    def read_with_gap(self, message: torch.Tensor, flat: torch.Tensor) -> None:
        """Fill a flat tensor of n·size elements, in one copy: the whole parameter, and the gap of the last ranks."""
        flat.view(message.shape[0], self.size).copy_(message[:, self.offset : self.offset + self.size])

    def _pairs(self, message: torch.Tensor, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The same rows in the message and in the whole: of all ranks with a full chunk at once, then the rest."""
        if not self.size:
            return
        full, rest = divmod(self.count, self.chunk)
        place = message[:, self.offset : self.offset + self.size]
        yield place[:full], flat[: full * self.size].view(full, self.size)
        if rest:
            yield place[full, : rest * self.width], flat[full * self.size :]


def lay_out(shapes: Mapping[str, torch.Size], world_size: int) -> tuple[dict[str, Rows], int]:
    """Return where each parameter's rows lie in a message over `world_size` ranks, and the length of a rank's part."""
    placed, offset = {}, 0
    for name, shape in shapes.items():
        count = shape[0] if shape else 1
        placed[name] = Rows(shape, offset, -(-count // world_size))
        offset += placed[name].size
    return placed, offset


class Shards:
    """The parameters of one unit that have one dtype, by name, of which each of `ranks` keeps its rows.

    `part` is what this rank keeps: one flat tensor in the parameters' own dtype. `masters`, which the optimizer works
    on, are views of it. `parameters`, the wrapped model's own, are views of `whole`, whose memory exists only between
    `gather` and `free`. `whole` and all messages have `compute_dtype`. `world_size` ranks share a copy of the model.
    A new `Shards` holds zeros, freed.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], ranks: Ranks, compute_dtype: torch.dtype):
        first = next(iter(parameters.values()))
        self.parameters, self.dtype, self.compute_dtype = parameters, first.dtype, compute_dtype
        self.comm, self.everyone = Comm(ranks, first.device), ranks.everyone
        self.rank, self.world_size = self.comm.rank, self.comm.world_size
        self.rows, size = lay_out({name: each.shape for name, each in parameters.items()}, self.world_size)
        self.part = torch.zeros(size, dtype=self.dtype, device=first.device)
        self.masters = {
            name: nn.Parameter(rows.shard(self.part, self.rank), requires_grad=parameters[name].requires_grad)
            for name, rows in self.rows.items()
        }
        self.trained = {name for name, each in parameters.items() if each.requires_grad}
        self._make_whole()

    @property
    def needs_gather(self) -> bool:
        """True if the parameters are neither gathered nor being gathered."""
        return not self.is_gathered and self._gathering is None and self.part.numel() > 0

    def gather(self) -> None:
        """Start to gather the parameters, if that is needed. One all-gather."""
        if self.needs_gather:
            self._gathering = self.comm.all_gather(self.part.to(self.compute_dtype))

    def wait_for_gather(self) -> None:
        """Gather the parameters, if that is needed, and wait until they have their values."""
        self.gather()
        self._finish_gather()
        for parameter in self.parameters.values():
            allow_reading(parameter)
        self.is_gathered = True

    def free(self) -> None:
        """Give the memory of the whole parameters back. Reading them raises until they are gathered again."""
        self._finish_gather()  # where they were gathered because other ranks needed them, and not used here
        for parameter in self.parameters.values():
            refuse_reading(parameter)
        self.whole.untyped_storage().resize_(0)
        self.is_gathered = False

    def abandon(self) -> None:
        """Free the parameters without waiting for a message that may never come."""
        self._make_whole()

    def adopt_changes(self) -> None:
        """Take over what the caller may change between passes: a master's `.data`, and what is trained."""
        for name, master in self.masters.items():
            parameter, mine = self.parameters[name], self.rows[name].shard(self.part, self.rank)
            if master.data_ptr() != mine.data_ptr() and master.shape == mine.shape and master.dtype == mine.dtype:
                mine.data.copy_(master.detach())
                master.data = mine
            if parameter.requires_grad != master.requires_grad:  # one of the two was changed, and the other follows
                wanted = name not in self.trained
                parameter.requires_grad_(wanted)
                master.requires_grad_(wanted)
        self.trained = {name for name, master in self.masters.items() if master.requires_grad}

    def problem(self) -> str | None:
        """Say what keeps these parameters from being gathered, or return None."""
        for name, rows in self.rows.items():
            parameter, master = self.parameters[name], self.masters[name]
            if master.dtype != self.dtype or master.shape != (len(rows.of_rank(self.rank)), *rows.shape[1:]):
                return f"the shard of {name!r} has become {master.dtype} {tuple(master.shape)}: change values in place"
            if self.is_gathered and parameter.untyped_storage()._cdata != self.whole.untyped_storage()._cdata:
                return f"the values of {name!r} were replaced after the model was wrapped: move or convert it before"
        return None

    def gather_full(self, mine: Mapping[str, torch.Tensor | None], keep: bool = True) -> dict[str, torch.Tensor | None]:
        """Return whole tensors by the parameters' names, put together from every rank's rows.

        `mine`: for each parameter a tensor of its master's shape and dtype, this rank's rows, or None on all ranks, for
        which the result has None too. A rank with `keep` False gets an empty dict. One all-gather, and memory for all
        of them twice.
        """
        message = self.part.new_empty(self.world_size, 0)  # of tensors without elements
        if self.part.numel() and any(tensor is not None for tensor in mine.values()):
            part = torch.zeros_like(self.part)
            for name, tensor in mine.items():
                if tensor is not None:
                    self.rows[name].shard(part, self.rank).copy_(tensor.detach())
            message = self.comm.all_gather(part).wait()
        each = mine.items() if keep else ()
        return {name: None if tensor is None else self.rows[name].read(message) for name, tensor in each}

    def scatter_full(self, wholes: Mapping[str, torch.Tensor] | None) -> None:
        """Set this rank's rows to those of the first rank's whole tensors, zeros where it has none.

        Other ranks pass None. One broadcast of all of them.
        """
        if not self.part.numel():
            return
        message = self.part.new_zeros(self.world_size, self.part.numel())
        for name, rows in self.rows.items():
            if wholes is not None and name in wholes:
                rows.write(message, wholes[name].detach())
        dist.broadcast(message, group=self.everyone, group_src=0)
        self.part.copy_(message[self.rank])

    def _make_whole(self) -> None:
        """Make the model's parameters views of new memory, which is freed at once."""
        sizes = [self.world_size * rows.size for rows in self.rows.values()]
        self.whole = self.part.new_empty(sum(sizes), dtype=self.compute_dtype)
        self._wholes = dict(zip(self.rows, self.whole.split(sizes), strict=True))
        for name, parameter in self.parameters.items():
            mark_sharded(parameter, name)
            shape = self.rows[name].shape
            parameter.data = self._wholes[name][: shape.numel()].view(shape)
        self._gathering: Pending | None = None  # an all-gather that has been started
        self.free()

    def _finish_gather(self) -> None:
        if self._gathering is None:
            return
        message = self._gathering.wait()
        # The storage remains the same one, so that tensors that autograd has saved get their values back as well.
        self.whole.untyped_storage().resize_(self.whole.numel() * self.whole.element_size())
        for name, rows in self.rows.items():
            rows.read_with_gap(message, self._wholes[name])
        self._gathering = None
